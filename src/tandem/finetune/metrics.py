"""Similarity of predictions to references: exact match, BLEU-1 to 4, ROUGE-1, 2 and L, in percent.

BLEU is sacrebleu's corpus BLEU with n-grams up to the given length. ROUGE is rouge-score's
F-measure, averaged over the rows. Each Chinese, Japanese or Korean character is a token.
"""

import re
from collections.abc import Sequence

__all__ = ["PACKAGES", "measure_matches", "measure_texts", "split_tokens"]

_IDEOGRAPHS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
_TOKEN = re.compile(rf"[{_IDEOGRAPHS}]|[^\W_{_IDEOGRAPHS}]+")
BLEU_ORDERS = (1, 2, 3, 4)
PACKAGES = ("sacrebleu", "rouge_score")
"""Packages that compute BLEU and ROUGE; the extra ``finetune`` installs them."""


def split_tokens(text: str) -> list[str]:
    """Return the words of a text in lower case, with each ideograph as a word; punctuation is
    dropped.
    """
    return _TOKEN.findall(text.lower())


class _Tokenizer:
    """The tokenizer object that the package rouge-score calls; it splits as ``split_tokens``."""

    def tokenize(self, text: str) -> list[str]:
        return split_tokens(text)


def measure_matches(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Return ``exact_match``: the percentage of predictions that equal their references.

    White space around both is ignored.

    Args:
        predictions: one text for each row; at least one row.
        references: the wanted text for each row.
    """
    assert len(predictions) == len(references) > 0, (len(predictions), len(references))
    same = [p.strip() == r.strip() for p, r in zip(predictions, references, strict=True)]
    return {"exact_match": 100 * sum(same) / len(same)}


def measure_texts(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Return ``bleu-1`` to ``bleu-4``, ``rouge-1``, ``rouge-2`` and ``rouge-l``, in percent.

    Args:
        predictions: one text for each row; at least one row.
        references: the wanted text for each row.

    Raises: ModuleNotFoundError: sacrebleu or rouge-score is not installed.
    """
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu.metrics.bleu import BLEU

    assert len(predictions) == len(references) > 0, (len(predictions), len(references))
    results: dict[str, float] = {}
    has_ideographs = any(re.search(f"[{_IDEOGRAPHS}]", text) for text in references)
    for order in BLEU_ORDERS:
        bleu = BLEU(max_ngram_order=order, tokenize="zh" if has_ideographs else "13a")
        results[f"bleu-{order}"] = bleu.corpus_score(list(predictions), [list(references)]).score
    kinds = ["rouge1", "rouge2", "rougeL"]
    scorer = RougeScorer(kinds, tokenizer=_Tokenizer())
    scores = [scorer.score(r, p) for p, r in zip(predictions, references, strict=True)]
    for kind in kinds:
        name = f"rouge-{kind.removeprefix('rouge').lower()}"
        results[name] = 100 * sum(score[kind].fmeasure for score in scores) / len(scores)
    return results
