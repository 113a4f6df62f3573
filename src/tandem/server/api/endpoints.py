"""The table of endpoints: paths, methods, handlers and types of bodies."""

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

import tandem
from tandem.core.instance_status import ExpertCounts
from tandem.core.timeline import RequestTimeline
from tandem.server.api import adapters, instances, ollama, status, tokens
from tandem.server.api.explain import get_timeline
from tandem.server.api.openapi import Endpoint, make_document
from tandem.server.api.traffic import record_traffic
from tandem.server.batches import endpoints as files
from tandem.server.config import ServerConfig
from tandem.server.context import ServerContext
from tandem.server.dialects.anthropic import answer_messages, count_message_tokens
from tandem.server.dialects.chat import answer_chat
from tandem.server.dialects.completions import answer_completion
from tandem.server.dialects.ollama import answer_ollama_chat, answer_ollama_generate
from tandem.server.dialects.responses.endpoints import (
    cancel_response,
    create_response,
    delete_response,
    get_response,
)
from tandem.server.dialects.sglang import answer_generate
from tandem.server.dialects.vectors.embeddings import (
    answer_embed,
    answer_embeddings,
    answer_old_embed,
)
from tandem.server.dialects.vectors.scores import answer_rerank, answer_score
from tandem.server.edge.auth import ADMIN_PATHS
from tandem.server.hub import endpoints as hosted
from tandem.server.lifecycle import OPEN_PATHS
from tandem.server.protocol import anthropic, batches, responses, rules, sglang, vectors
from tandem.server.protocol import ollama as own
from tandem.server.protocol import openai as oai
from tandem.server.protocol import status as replies
from tandem.server.protocol.adapters import (
    AdapterReply,
    LoadAdapterRequest,
    UnloadAdapterRequest,
)
from tandem.server.protocol.hub import ChangeModels, HostedModels
from tandem.server.protocol.instances import ChangeInstances, InstanceList
from tandem.server.protocol.traffic import RecordTraffic, TrafficReply

__all__ = ["list_endpoints"]

_GET, _POST, _BOTH = ("GET",), ("POST",), ("GET", "POST")


async def get_openapi(context: ServerContext, _: Request) -> Response:
    """Return the OpenAPI document of all endpoints."""
    num_token_ids = context.encoder.tokenizer.vocab_size
    if context.engine.last_info is not None:
        num_token_ids = min(num_token_ids, context.engine.last_info.vocab_size)
    document = make_document(
        list_endpoints(context.config),
        version=tandem.__version__,
        has_keys=context.has_keys,
        has_admin_keys=context.has_admin_keys,
        open_paths=OPEN_PATHS,
        admin_paths=ADMIN_PATHS,
        num_token_ids=num_token_ids,
        max_choices=context.config.max_choices,
    )
    return Response(msgspec.json.encode(document), media_type="application/json")


def list_endpoints(config: ServerConfig) -> list[Endpoint]:
    """Return all endpoints of a server with these settings."""
    table = [
        Endpoint(
            "/v1/chat/completions",
            _POST,
            answer_chat,
            oai.ChatCompletion,
            oai.ChatRequest,
            oai.ChatChunk,
            rule=rules.CHAT,
        ),
        Endpoint(
            "/v1/completions",
            _POST,
            answer_completion,
            oai.Completion,
            oai.CompletionRequest,
            oai.Completion,
            rule=rules.COMPLETION,
        ),
        Endpoint(
            "/v1/messages",
            _POST,
            answer_messages,
            anthropic.MessagesReply,
            anthropic.MessagesRequest,
            dict,
            rule=rules.MESSAGES,
        ),
        Endpoint(
            "/v1/messages/count_tokens",
            _POST,
            count_message_tokens,
            anthropic.CountReply,
            anthropic.CountRequest,
            rule=rules.MESSAGES,
        ),
        Endpoint(
            "/v1/responses",
            _POST,
            create_response,
            responses.ResponseDocument,
            responses.ResponsesRequest,
            dict,
            rule=rules.RESPONSES,
        ),
        Endpoint("/v1/responses/{id}", _GET, get_response, responses.ResponseDocument),
        Endpoint("/v1/responses/{id}", ("DELETE",), delete_response, responses.DeletedResponse),
        Endpoint("/v1/responses/{id}/cancel", _POST, cancel_response, responses.ResponseDocument),
        *_list_batches(),
        *_list_vectors(),
        *_list_ollama(),
        Endpoint("/v1/models", _GET, status.list_models, oai.ModelList),
        Endpoint("/v1/models/{name:path}", _GET, status.get_model, oai.ModelCard),
        Endpoint(
            "/generate",
            _POST,
            answer_generate,
            sglang.GenerateResponse | list[sglang.GenerateResponse],
            sglang.GenerateRequest,
            sglang.GenerateResponse,
            rule=rules.GENERATE,
        ),
        *(
            Endpoint(
                path,
                _POST,
                tokens.tokenize,
                replies.TokenizeReply,
                oai.TokenizeRequest,
                rule=rules.TOKENIZE,
            )
            for path in ("/tokenize", "/v1/tokenize")
        ),
        *(
            Endpoint(
                path,
                _POST,
                tokens.detokenize,
                replies.DetokenizeReply,
                oai.DetokenizeRequest,
                rule=rules.DETOKENIZE,
            )
            for path in ("/detokenize", "/v1/detokenize")
        ),
        *(
            Endpoint(path, _GET, status.get_model_info, replies.ModelInfo)
            for path in ("/get_model_info", "/model_info")
        ),
        *(
            Endpoint(path, _GET, status.get_server_info, replies.ServerInfo)
            for path in ("/get_server_info", "/server_info")
        ),
        Endpoint("/expert_counts", _GET, status.get_expert_counts, ExpertCounts),
        Endpoint("/flush_cache", _BOTH, status.flush_cache, replies.FlushReply),
        Endpoint(
            "/abort_request",
            _POST,
            status.abort_request,
            replies.AbortReply,
            sglang.AbortRequest,
            rule=rules.ABORT,
        ),
        Endpoint(
            "/v1/load_lora_adapter",
            _POST,
            adapters.load_adapter,
            str,
            LoadAdapterRequest,
            media_type="text/plain",
        ),
        Endpoint(
            "/v1/unload_lora_adapter",
            _POST,
            adapters.unload_adapter,
            str,
            UnloadAdapterRequest,
            media_type="text/plain",
        ),
        Endpoint(
            "/load_lora_adapter",
            _POST,
            adapters.load_adapter_sglang,
            AdapterReply,
            LoadAdapterRequest,
        ),
        Endpoint(
            "/unload_lora_adapter",
            _POST,
            adapters.unload_adapter_sglang,
            AdapterReply,
            UnloadAdapterRequest,
        ),
        Endpoint("/instances", _GET, instances.list_instances, InstanceList),
        Endpoint("/instances", _POST, instances.change_instances, InstanceList, ChangeInstances),
        Endpoint("/traffic", _POST, record_traffic, TrafficReply, RecordTraffic),
        Endpoint("/models", _GET, hosted.list_hosted_models, HostedModels),
        Endpoint("/models", _POST, hosted.change_models, HostedModels, ChangeModels),
        Endpoint("/requests/{id:path}/timeline", _GET, get_timeline, RequestTimeline),
        Endpoint("/health", _GET, status.get_health, replies.Health),
        # SageMaker checks health at /ping; vLLM answers GET and POST there, so both are answered.
        Endpoint("/ping", _BOTH, status.get_health, replies.Health),
        Endpoint("/live", _GET, status.get_live, replies.Health),
        Endpoint("/ready", _GET, status.get_ready, replies.Readiness),
        Endpoint("/version", _GET, status.get_version, replies.Version),
        Endpoint("/openapi.json", _GET, get_openapi, dict),
    ]
    if config.metrics:
        page = CONTENT_TYPE_LATEST.partition(";")[0]
        table.append(Endpoint("/metrics", _GET, status.get_metrics, str, media_type=page))
    return table


def _list_batches() -> list[Endpoint]:
    return [
        # POST /v1/files has no struct for its body: an upload is a multipart form.
        Endpoint("/v1/files", _POST, files.upload_file, batches.FileObject),
        Endpoint("/v1/files", _GET, files.list_files, batches.FileList),
        Endpoint("/v1/files/{id}", _GET, files.get_file, batches.FileObject),
        Endpoint("/v1/files/{id}", ("DELETE",), files.delete_file, batches.DeletedFile),
        Endpoint(
            "/v1/files/{id}/content",
            _GET,
            files.get_file_content,
            str,
            media_type="application/octet-stream",
        ),
        Endpoint("/v1/batches", _POST, files.create_batch, batches.Batch, batches.BatchRequest),
        Endpoint("/v1/batches", _GET, files.list_batches, batches.BatchList),
        Endpoint("/v1/batches/{id}", _GET, files.get_batch, batches.Batch),
        Endpoint("/v1/batches/{id}", ("DELETE",), files.delete_batch, batches.DeletedBatch),
        Endpoint("/v1/batches/{id}/cancel", _POST, files.cancel_batch, batches.Batch),
    ]


def _list_vectors() -> list[Endpoint]:
    return [
        Endpoint(
            "/v1/embeddings",
            _POST,
            answer_embeddings,
            vectors.EmbeddingList,
            vectors.EmbeddingRequest,
            rule=rules.EMBEDDING,
        ),
        *(
            Endpoint(path, _POST, answer_score, vectors.ScoreList, vectors.ScoreRequest)
            for path in ("/v1/score", "/score")
        ),
        *(
            Endpoint(path, _POST, answer_rerank, vectors.RerankReply, vectors.RerankRequest)
            for path in ("/v1/rerank", "/rerank", "/v2/rerank")
        ),
    ]


def _list_ollama() -> list[Endpoint]:
    return [
        Endpoint(
            "/api/chat",
            _POST,
            answer_ollama_chat,
            own.ChatReply,
            own.OllamaChatRequest,
            own.ChatReply,
            is_lines=True,
        ),
        Endpoint(
            "/api/generate",
            _POST,
            answer_ollama_generate,
            own.GenerateReply,
            own.OllamaGenerateRequest,
            own.GenerateReply,
            is_lines=True,
        ),
        Endpoint("/api/embed", _POST, answer_embed, vectors.EmbedReply, vectors.EmbedRequest),
        Endpoint(
            "/api/embeddings",
            _POST,
            answer_old_embed,
            vectors.OldEmbedReply,
            vectors.OldEmbedRequest,
        ),
        Endpoint("/api/show", _POST, ollama.show_model, own.ShowReply, own.ShowRequest),
        Endpoint("/api/tags", _GET, ollama.list_tags, own.TagList),
        Endpoint("/api/ps", _GET, ollama.list_running, own.ProcessList),
        Endpoint("/api/version", _GET, ollama.get_ollama_version, own.OllamaVersion),
    ]
