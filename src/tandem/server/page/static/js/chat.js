// The conversation: what was said, how it is shown, and the request that is running.

import { ask, readEvents } from "/page/js/api.js";
import { at, make, show } from "/page/js/dom.js";
import { copyButton, render } from "/page/js/markdown.js";
import { readNote, readSettings, readSystem } from "/page/js/settings.js";
import { noteRequest, openTimeline } from "/page/js/requests.js";

const RENDER_EVERY_MS = 60;
const EXAMPLES = [
  "Explain what a KV cache is, in three sentences.",
  "Write a Python function that reads a file line by line.",
  "Compare TCP and UDP in a table.",
];

let turns = [];
let running = null; // The AbortController of the answer that comes in.
let editing = -1; // Which turn is being edited.

/** Make the chat work: composer, buttons, keys. */
export function makeChat() {
  const prompt = at("prompt");
  at("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    const content = prompt.value.trim();
    if (!content || running) return;
    prompt.value = "";
    grow(prompt);
    turns.push({ role: "user", content });
    answer();
  });
  prompt.addEventListener("input", () => grow(prompt));
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      at("composer").requestSubmit();
    }
  });
  at("stop").addEventListener("click", () => running?.abort());
  at("clear").addEventListener("click", () => {
    running?.abort();
    turns = [];
    editing = -1;
    showTurns();
    prompt.focus();
  });
  addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running && !document.querySelector("dialog[open]")) running.abort();
  });
  showTurns();
}

function grow(field) {
  field.style.height = "auto";
  field.style.height = `${Math.min(field.scrollHeight + 2, 280)}px`;
}

function listMessages() {
  const messages = readSystem();
  for (const turn of turns) {
    if (turn.role === "assistant") {
      if (!turn.content && !turn.calls.length) continue;
      const message = { role: "assistant", content: turn.content || null };
      if (turn.calls.length) {
        message.tool_calls = turn.calls.map(({ id, name, text }) => ({
          id,
          type: "function",
          function: { name, arguments: text || "{}" },
        }));
      }
      messages.push(message);
    } else if (turn.role === "tool") {
      messages.push({ role: "tool", tool_call_id: turn.id, content: turn.content });
    } else {
      messages.push({ role: "user", content: turn.content });
    }
  }
  return messages;
}

async function answer() {
  const turn = {
    role: "assistant", content: "", reasoning: "", calls: [], error: "", note: "", id: "",
    began: performance.now(), first: 0, reasoned: 0, usage: null, model: "",
  };
  const messages = listMessages();
  turns.push(turn);
  editing = -1;
  running = new AbortController();
  showTurns();
  setBusy(true);
  let shown = 0;
  let timer = 0;
  const refresh = () => {
    if (timer) return;
    timer = setTimeout(() => {
      timer = 0;
      shown = performance.now();
      showLast();
    }, Math.max(0, RENDER_EVERY_MS - (performance.now() - shown)));
  };
  try {
    const body = {
      ...readSettings(),
      messages,
      stream: true,
      stream_options: { include_usage: true },
    };
    turn.model = body.model;
    const response = await ask("/v1/chat/completions", { body, signal: running.signal });
    for await (const event of readEvents(response)) {
      take(turn, event);
      refresh();
    }
  } catch (error) {
    if (error.name === "AbortError") turn.note = "You stopped this answer.";
    else turn.error = error.message;
  } finally {
    clearTimeout(timer);
    turn.ended = performance.now();
    running = null;
    if (turn.id) noteRequest(turn.id, turn.model);
    if (turns.includes(turn)) showTurns();
    setBusy(false);
  }
}

function take(turn, event) {
  if (!turn.id && event.id) turn.id = event.id;
  if (event.usage) turn.usage = event.usage;
  const choice = event.choices?.[0];
  if (!choice) return;
  const { delta } = choice;
  const now = performance.now();
  if (delta.reasoning_content) turn.reasoning += delta.reasoning_content;
  if (delta.content) {
    if (turn.reasoning && !turn.reasoned) turn.reasoned = now;
    turn.content += delta.content;
  }
  for (const part of delta.tool_calls ?? []) {
    const call = (turn.calls[part.index] ??= { id: "", name: "", text: "", result: "" });
    call.id ||= part.id ?? "";
    call.name += part.function?.name ?? "";
    call.text += part.function?.arguments ?? "";
  }
  if (!turn.first && (delta.content || delta.reasoning_content || delta.tool_calls)) turn.first = now;
  if (choice.finish_reason === "length") turn.note = "The answer ends here because it has reached its limit.";
}

function setBusy(isBusy) {
  at("send").hidden = isBusy;
  at("stop").hidden = !isBusy;
  at("messages").setAttribute("aria-busy", String(isBusy));
  if (!isBusy && document.activeElement === document.body) at("prompt").focus();
}

// ---- How turns look.

function showTurns() {
  const list = at("messages");
  const isAtEnd = nearEnd(list);
  show(list, turns.length ? turns.map((turn, index) => drawTurn(turn, index)) : drawWelcome());
  if (isAtEnd) list.scrollTop = list.scrollHeight;
}

function showLast() {
  const list = at("messages");
  const isAtEnd = nearEnd(list);
  const last = turns.length - 1;
  if (last < 0 || !list.lastElementChild) return;
  const wasOpen = list.lastElementChild.querySelector("details.thought")?.open ?? false;
  const fresh = drawTurn(turns[last], last);
  const thought = fresh.querySelector("details.thought");
  if (thought) thought.open = wasOpen;
  list.lastElementChild.replaceWith(fresh);
  if (isAtEnd) list.scrollTop = list.scrollHeight;
}

function nearEnd(list) {
  return list.scrollHeight - list.scrollTop - list.clientHeight < 80;
}

function drawWelcome() {
  return make(
    "div",
    { class: "welcome" },
    make("h2", {}, "What shall we talk about?"),
    make("p", { class: "hint" }, "The model runs on this server, and what you write stays there."),
    readNote() ? make("p", { class: "hint", id: "model-warning" }, readNote()) : null,
    make(
      "div",
      { class: "examples" },
      EXAMPLES.map((text) =>
        make("button", { type: "button", class: "example", onclick: () => start(text) }, text),
      ),
    ),
  );
}

/** Draw the welcome again, if nothing has been said yet: it tells what is known of the model. */
export function refreshWelcome() {
  if (!turns.length) showTurns();
}

function start(text) {
  at("prompt").value = text;
  at("prompt").focus();
  grow(at("prompt"));
}

function drawTurn(turn, index) {
  if (turn.role === "user") return index === editing ? drawEditor(turn, index) : drawUser(turn, index);
  if (turn.role === "tool") {
    return make(
      "article",
      { class: "turn tool", "aria-label": `Result of ${turn.name}` },
      make("p", { class: "who" }, `Result of ${turn.name}`),
      make("pre", { class: "plain", tabindex: "0" }, turn.content),
    );
  }
  return drawAssistant(turn, index);
}

function drawUser(turn, index) {
  return make(
    "article",
    { class: "turn user", "aria-label": "You" },
    make("div", { class: "bubble" }, turn.content),
    running
      ? null
      : make(
          "div",
          { class: "actions" },
          make("button", { type: "button", class: "small", onclick: () => edit(index) }, "Edit"),
          copyButton(() => turn.content),
        ),
  );
}

function edit(index) {
  editing = index;
  showTurns();
  at("edited").focus();
}

function drawEditor(turn, index) {
  const field = make("textarea", { id: "edited", rows: "4", value: turn.content });
  const save = () => {
    const content = field.value.trim();
    if (!content || running) return;
    turns = [...turns.slice(0, index), { role: "user", content }];
    answer();
  };
  return make(
    "article",
    { class: "turn user", "aria-label": "You, being edited" },
    make("label", { class: "unseen", for: "edited" }, "Edit the message"),
    field,
    make(
      "div",
      { class: "actions" },
      make("button", { type: "button", class: "small strong", onclick: save }, "Ask again"),
      make("button", { type: "button", class: "small", onclick: () => { editing = -1; showTurns(); } }, "Cancel"),
    ),
  );
}

function drawAssistant(turn, index) {
  const isRunning = running && index === turns.length - 1;
  const isLast = index === turns.length - 1;
  const parts = [make("p", { class: "who" }, turn.model || "Assistant")];
  if (turn.reasoning) parts.push(drawThought(turn, isRunning));
  if (turn.content) parts.push(make("div", { class: "prose" }, render(turn.content)));
  else if (isRunning && !turn.reasoning && !turn.calls.length) {
    parts.push(make("p", { class: "waiting" }, "Reading the prompt"));
  }
  turn.calls.forEach((call) => parts.push(drawCall(call, isLast && !isRunning)));
  if (turn.calls.length && isLast && !isRunning) {
    parts.push(make("button", { type: "button", class: "small strong", onclick: () => giveResults(turn) }, "Send results"));
  }
  if (turn.note) parts.push(make("p", { class: "hint" }, turn.note));
  if (turn.error) parts.push(make("p", { class: "notice", role: "alert" }, turn.error));
  if (!isRunning) {
    const actions = [];
    if (turn.content) actions.push(copyButton(() => turn.content));
    if (isLast && !running) {
      const word = turn.error ? "Try again" : "Regenerate";
      actions.push(make("button", { type: "button", class: "small", onclick: regenerate }, word));
    }
    if (turn.id) {
      actions.push(make("button", { type: "button", class: "small", onclick: () => openTimeline(turn.id) }, "Timeline"));
    }
    parts.push(make("div", { class: "actions" }, actions, make("span", { class: "figures" }, describeSpeed(turn))));
  }
  return make("article", { class: "turn assistant", "aria-label": turn.model || "Assistant" }, parts);
}

function drawThought(turn, isRunning) {
  const seconds = (((turn.reasoned || turn.ended || performance.now()) - (turn.first || turn.began)) / 1000).toFixed(1);
  const title = isRunning && !turn.content ? "Thinking" : `Thought for ${seconds} s`;
  return make(
    "details",
    { class: "thought" },
    make("summary", {}, title),
    make("div", { class: "prose" }, render(turn.reasoning)),
  );
}

function drawCall(call, isOpen) {
  let text = call.text;
  try {
    text = JSON.stringify(JSON.parse(call.text), null, 2);
  } catch {
    // Not whole yet, or no JSON: as it came.
  }
  const name = `result-${call.id}`;
  return make(
    "section",
    { class: "call", "aria-label": `Call of ${call.name}` },
    make("p", { class: "call-name" }, "Calls ", make("code", {}, call.name)),
    make("pre", { class: "plain", tabindex: "0" }, text),
    isOpen ? make("label", { for: name }, "Result") : null,
    isOpen
      ? make("textarea", { id: name, rows: "2", class: "mono", value: call.result, oninput: (event) => (call.result = event.target.value) })
      : null,
  );
}

function giveResults(turn) {
  for (const { id, name, result } of turn.calls) {
    turns.push({ role: "tool", id, name, content: result });
  }
  answer();
}

function regenerate() {
  if (running) return;
  turns.pop();
  answer();
}

function describeSpeed(turn) {
  const words = [];
  const tokens = turn.usage?.completion_tokens;
  if (tokens) words.push(`${tokens} tokens`);
  if (turn.first) words.push(`first after ${((turn.first - turn.began) / 1000).toFixed(2)} s`);
  const seconds = (turn.ended - turn.first) / 1000;
  if (tokens > 1 && turn.first && seconds > 0) words.push(`${((tokens - 1) / seconds).toFixed(1)} tokens/s`);
  const cached = turn.usage?.prompt_tokens_details?.cached_tokens;
  if (cached) words.push(`${cached} of ${turn.usage.prompt_tokens} prompt tokens from the cache`);
  return words.join(" · ");
}
