// The page as a whole: views, theme, the key, and whether the server is ready.

import { hasKey, onKeyWanted, setKey } from "/page/js/api.js";
import { at } from "/page/js/dom.js";
import { makeChat, refreshWelcome } from "/page/js/chat.js";
import { makeLive, recolour, watch } from "/page/js/live.js";
import { makeRequests } from "/page/js/requests.js";
import { loadSettings, makeSettings } from "/page/js/settings.js";

const VIEWS = ["chat", "live", "requests"];
const PROBE_MS = 5000;
const LOADING_PROBE_MS = 1000;

function open(name, { focus = false } = {}) {
  for (const each of VIEWS) {
    const isChosen = each === name;
    at(`view-${each}`).hidden = !isChosen;
    const tab = at(`tab-${each}`);
    tab.setAttribute("aria-selected", String(isChosen));
    tab.tabIndex = isChosen ? 0 : -1;
    if (isChosen && focus) tab.focus();
  }
  watch(name === "live");
  if (location.hash !== `#${name}`) history.replaceState(null, "", `#${name}`);
}

function makeTabs() {
  VIEWS.forEach((name, index) => {
    const tab = at(`tab-${name}`);
    tab.addEventListener("click", () => open(name));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step) open(VIEWS[(index + step + VIEWS.length) % VIEWS.length], { focus: true });
      else if (event.key === "Home") open(VIEWS[0], { focus: true });
      else if (event.key === "End") open(VIEWS.at(-1), { focus: true });
    });
  });
  const asked = location.hash.slice(1);
  open(VIEWS.includes(asked) ? asked : "chat");
}

function makeTheme() {
  const button = at("theme");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const paint = (theme) => {
    document.documentElement.dataset.theme = theme;
    button.textContent = theme === "dark" ? "Light" : "Dark";
    button.setAttribute("aria-label", `Use the ${theme === "dark" ? "light" : "dark"} theme`);
    recolour();
  };
  button.addEventListener("click", () => paint(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
  dark.addEventListener("change", () => paint(dark.matches ? "dark" : "light"));
  paint(dark.matches ? "dark" : "light");
}

// One dialog however many requests want the key.
let asking = null;

function makeKeyDialog() {
  const dialog = at("key-dialog");
  const field = at("key");
  const openDialog = (why) =>
    (asking ??= new Promise((resolve) => {
      at("key-why").textContent = why;
      field.value = "";
      dialog.returnValue = "";
      dialog.showModal();
      dialog.addEventListener(
        "close",
        () => {
          asking = null;
          const isGiven = dialog.returnValue === "given" && field.value.trim() !== "";
          if (isGiven) setKey(field.value);
          field.value = "";
          resolve(isGiven);
        },
        { once: true },
      );
    }));
  at("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    dialog.close("given");
  });
  at("key-cancel").addEventListener("click", () => dialog.close(""));
  const memory = "The page keeps it in memory until you close or reload it.";
  onKeyWanted(() => openDialog(hasKey() ? `The server does not know that key. ${memory}` : memory));
  at("open-key").addEventListener("click", async () => {
    if (await openDialog(memory)) loadSettings().catch(showFailure);
  });
}

function showState(kind, text) {
  at("state").dataset.kind = kind;
  if (at("state-text").textContent !== text) at("state-text").textContent = text;
}

function showFailure(error) {
  showState("bad", error.message);
}

// The probe needs no key, so that a loading server is told from one that is gone.
async function probe() {
  let ready = null;
  try {
    const reply = await fetch("/ready", { cache: "no-store", credentials: "omit" });
    ready = await reply.json();
  } catch {
    showState("bad", "The server cannot be reached");
  }
  const isReady = ready?.status === "ready";
  if (isReady) {
    if (!probe.wasReady) {
      showState("good", "Ready");
      loadSettings().catch(showFailure);
    } else if (at("state").dataset.kind !== "good") showState("good", "Ready");
  } else if (ready) {
    const share = ready.total ? `, ${Math.round((100 * ready.done) / ready.total)} %` : "";
    showState("wait", `${ready.status[0].toUpperCase()}${ready.status.slice(1)}${share}`);
  }
  probe.wasReady = isReady;
  setTimeout(probe, isReady ? PROBE_MS : LOADING_PROBE_MS);
}

makeSettings(refreshWelcome);
at("settings").open = matchMedia("(min-width: 68rem)").matches;
makeRequests(() => open("requests"));
makeLive();
makeChat();
makeKeyDialog();
makeTheme();
makeTabs();
probe();
