// Elements without markup in strings: text stays text, and the page's policy allows no other way.

const SVG = "http://www.w3.org/2000/svg";

/** Make an element: `make("p", {class: "hint", onclick: f}, "text", child)`. */
export function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Make an SVG element. */
export function draw(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "open" || name === "hidden") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** Return the element of an id. */
export function at(id) {
  return document.getElementById(id);
}

/** Give an element other children, unless they would look the same. */
export function show(element, ...children) {
  element.replaceChildren(...children.flat().filter((child) => child !== null));
}
