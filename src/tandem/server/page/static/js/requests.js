// One request's time as a picture: what `tandem explain` tells, from the same endpoint.

import { askJson } from "/page/js/api.js";
import { at, make, show } from "/page/js/dom.js";
import { drawTimeline } from "/page/js/timeline.js";

const KEPT = 20;
const sent = [];
let openView = () => {};

/** Build the view. */
export function makeRequests(open) {
  openView = open;
  const field = make("input", { id: "request-id", type: "text", spellcheck: "false", autocomplete: "off" });
  const form = make(
    "form",
    { class: "row ask-id" },
    make("div", { class: "field wide" }, make("label", { for: "request-id" }, "Id of an answer, or its x-request-id"), field),
    make("button", { type: "submit", class: "primary" }, "Show"),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (field.value.trim()) openTimeline(field.value.trim());
  });
  show(
    at("view-requests"),
    make("h2", {}, "Where a request's time went"),
    form,
    make("div", { id: "sent" }),
    make("div", { id: "timeline", "aria-live": "polite" }),
  );
  showSent();
}

/** Remember a request of this page. */
export function noteRequest(id, model) {
  sent.unshift({ id, model, at: new Date() });
  sent.length = Math.min(sent.length, KEPT);
  showSent();
}

/** Go to the view and show a request. */
export async function openTimeline(id) {
  openView();
  at("request-id").value = id;
  const place = at("timeline");
  show(place, make("p", { class: "hint" }, "Asking the server"));
  try {
    const timeline = await askJson(`/requests/${encodeURIComponent(id)}/timeline`);
    show(place, drawTimeline(timeline));
  } catch (error) {
    show(place, make("p", { class: "notice", role: "alert" }, error.message));
  }
}

function showSent() {
  const place = at("sent");
  if (!place) return;
  if (!sent.length) {
    show(place, make("p", { class: "hint" }, "Requests of the chat are listed here once they have ended."));
    return;
  }
  show(
    place,
    make("h3", {}, "From this page"),
    make(
      "ul",
      { class: "sent" },
      sent.map(({ id, model, at: when }) =>
        make(
          "li",
          {},
          make("button", { type: "button", class: "link", onclick: () => openTimeline(id) }, id),
          make("span", { class: "hint" }, ` ${model}, ${when.toLocaleTimeString("en-GB")}`),
        ),
      ),
    ),
  );
}
