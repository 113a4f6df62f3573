// What a chat asks with: model, system prompt, sampling, tools.

import { askJson } from "/page/js/api.js";
import { at, make, show } from "/page/js/dom.js";

const CONTROLS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.05, unset: "1" },
  { name: "top_p", label: "Top p", min: 0.01, max: 1, step: 0.01, unset: "1" },
  { name: "top_k", label: "Top k", min: 1, max: 1000, step: 1, unset: "all" },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01, unset: "0" },
  { name: "max_tokens", label: "Longest answer", min: 1, max: 1 << 20, step: 1, unset: "no limit" },
  { name: "seed", label: "Seed", min: 0, max: 2 ** 31, step: 1, unset: "random" },
];

let onModel = () => {};

/** Make the fields of sampling; an empty one leaves the choice to the server, and shows it. `changed`
 * is called when another model is chosen, or more is known of it. */
export function makeSettings(changed) {
  onModel = changed;
  for (const { name, label, min, max, step, unset } of CONTROLS) {
    const field = make("input", {
      id: `sampling-${name}`,
      type: "number",
      inputmode: "decimal",
      min,
      max,
      step,
      placeholder: unset,
    });
    at("sampling").append(
      make("div", { class: "field" }, make("label", { for: field.id }, label), field),
    );
  }
  at("model").addEventListener("change", describeModel);
}

let models = [];

/** Read what can be asked for, and the sampling that holds where a chat sets none. */
export async function loadSettings() {
  const { data } = await askJson("/v1/models");
  const chosen = at("model").value;
  models = data;
  show(
    at("model"),
    data.map(({ id, parent }) =>
      make("option", { value: id }, parent ? `${id} (adapter of ${parent})` : id),
    ),
  );
  if (data.some(({ id }) => id === chosen)) at("model").value = chosen;
  describeModel();
}

function describeModel() {
  const model = models.find(({ id }) => id === at("model").value);
  const length = model?.max_model_len;
  at("model-note").textContent = length
    ? `Up to ${length.toLocaleString("en")} tokens, prompt and answer together.`
    : "";
  for (const { name, unset } of CONTROLS) {
    const value = model?.default_sampling?.[name];
    // No number of likeliest tokens, 0 or less, is all of them.
    const isSet = value !== undefined && (name !== "top_k" || value > 0);
    at(`sampling-${name}`).placeholder = isSet ? String(value) : unset;
  }
  onModel();
}

/** Return the sentence that the server has for whoever begins to chat with the chosen model. */
export function readNote() {
  return models.find(({ id }) => id === at("model").value)?.note ?? "";
}

/** Return the fields of a request; throws a sentence if one is wrong. */
export function readSettings() {
  const request = { model: at("model").value };
  for (const { name, label } of CONTROLS) {
    const field = at(`sampling-${name}`);
    if (!field.validity.valid) {
      at("settings").open = true;
      field.focus();
      throw new Error(`${label} must be a number from ${field.min} to ${field.max}.`);
    }
    if (field.value !== "") request[name] = Number(field.value);
  }
  const tools = at("tools").value.trim();
  if (tools) {
    try {
      request.tools = JSON.parse(tools);
    } catch (error) {
      at("settings").open = true;
      at("tools").focus();
      throw new Error(`The tools are no JSON: ${error.message}.`);
    }
  }
  return request;
}

/** Return the messages that come before all others. */
export function readSystem() {
  const content = at("system").value.trim();
  return content ? [{ role: "system", content }] : [];
}
