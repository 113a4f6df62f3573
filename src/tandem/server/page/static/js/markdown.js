// Text of a model to elements: markdown, code in colours, and nothing that runs or loads.

import MarkdownIt from "/page/vendor/markdown-it.mjs";
import DOMPurify from "/page/vendor/purify.mjs";
import highlight from "/page/vendor/highlight.mjs";
import { make } from "/page/js/dom.js";

const markdown = new MarkdownIt({ html: false, linkify: true, breaks: true, highlight: colour });

// A picture would be fetched when the answer is shown, and could carry away what was said: its
// address is shown as a link, which a person may follow.
markdown.renderer.rules.image = (tokens, index) => {
  const { attrs, content } = tokens[index];
  const source = markdown.utils.escapeHtml(attrs[tokens[index].attrIndex("src")][1]);
  return `<a href="${source}">${markdown.utils.escapeHtml(content || source)}</a>`;
};

const ALLOWED = {
  ALLOWED_TAGS: (
    "a b blockquote br code del em h1 h2 h3 h4 h5 h6 hr i li ol p pre s span strong sub sup " +
    "table tbody td th thead tr ul"
  ).split(" "),
  ALLOWED_ATTR: ["href", "class", "start"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};
const LONGEST_COLOURED = 20_000;

function colour(code, language) {
  if (!language || !highlight.getLanguage(language) || code.length > LONGEST_COLOURED) return "";
  return highlight.highlight(code, { language, ignoreIllegals: true }).value;
}

/** Return the elements of a text in markdown. */
export function render(text) {
  const fragment = DOMPurify.sanitize(markdown.render(text), ALLOWED);
  for (const link of fragment.querySelectorAll("a[href]")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  for (const block of fragment.querySelectorAll("pre")) frame(block);
  for (const table of fragment.querySelectorAll("table")) {
    const around = make("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Table" });
    table.replaceWith(around);
    around.append(table);
  }
  return fragment;
}

function frame(block) {
  const code = block.querySelector("code");
  const name = /language-([\w+#-]+)/.exec(code?.className ?? "")?.[1] ?? "";
  const around = make("div", { class: "code" });
  block.replaceWith(around);
  block.tabIndex = 0;
  block.setAttribute("role", "group");
  block.setAttribute("aria-label", name ? `Code in ${name}` : "Code");
  around.append(
    make("div", { class: "code-head" }, make("span", {}, name), copyButton(() => block.textContent)),
    block,
  );
}

/** Make a button that copies a text, and says that it did. */
export function copyButton(read, label = "Copy") {
  const button = make("button", { type: "button", class: "small" }, label);
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(read());
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not allowed here";
    }
    setTimeout(() => (button.textContent = label), 1600);
  });
  return button;
}
