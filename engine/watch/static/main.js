// The page as a whole: which address shows what.
//
//     #/                      the list of runs
//     #/run/NAME              a run; /node/NODE, /edge/A->B, /sample/KEY behind it open the panel
//     #/compare/A,B           runs side by side
//
// Owns: the address, the banner, what is mounted. Does not own: any page.

import { onReachable, Refused } from "./api.js";
import { el, empty } from "./dom.js";
import { openCompare } from "./compare.js";
import { listen } from "./keys.js";
import { Panel } from "./panel.js";
import { cannotOpen, openRun } from "./run.js";
import { Runs } from "./runs.js";

const main = document.getElementById("main");
const headline = document.getElementById("headline");
const banner = document.getElementById("banner");
const panel = new Panel(document.getElementById("panel"), () => goTo(null));

let page = null;
let asked = 0;

/** `{kind, names, part}` of an address; `#A,B`, which the server's first page has, names runs. */
function route() {
  const bare = location.hash.slice(1);
  if (bare && !bare.startsWith("/")) {
    const names = bare.split(",").map(decodeURIComponent);
    return { kind: names.length > 1 ? "compare" : "run", names, part: null };
  }
  const parts = location.hash.replace(/^#\/?/, "").split("/").filter(Boolean);
  const decoded = parts.map(decodeURIComponent);
  if (parts[0] === "run" && parts[1]) {
    const part = parts[3] ? { kind: decoded[2], id: decoded[3] } : null;
    return { kind: "run", names: [decoded[1]], part };
  }
  if (parts[0] === "compare" && parts[1]) {
    return { kind: "compare", names: parts[1].split(",").map(decodeURIComponent) };
  }
  return { kind: "runs", names: [] };
}

/** Changes the address to a part of the run that is shown. */
function goTo(part) {
  const run = `#/run/${encodeURIComponent(route().names[0])}`;
  const hash = part ? `${run}/${part.kind}/${encodeURIComponent(part.id)}` : run;
  if (hash !== location.hash) location.hash = hash;
}

function mount(made) {
  page = made;
  headline.replaceChildren(...made.headline);
  main.replaceChildren(...(made.elements ?? [made.element]));
}

async function open({ kind, names }) {
  if (kind === "run") return openRun(names[0], panel, goTo);
  if (kind === "compare") return openCompare(names);
  return new Runs();
}

async function show() {
  const to = route();
  if (to.kind === "run" && page?.name === to.names[0]) return page.show(to.part);
  const number = (asked += 1);
  page?.close?.();
  page = null;
  panel.hide();
  main.replaceChildren(empty("Loading ..."));
  let made;
  try {
    made = await open(to);
  } catch (error) {
    if (number !== asked) return undefined;
    headline.replaceChildren(el("h1", { text: to.names.join(", ") }));
    main.replaceChildren(...cannotOpen(to.names.join(", "), error));
    if (!(error instanceof Refused)) setTimeout(() => number === asked && show(), 1000);
    return undefined;
  }
  if (number !== asked) return made.close?.();
  mount(made);
  if (to.part) made.show(to.part, { quiet: true });
  return undefined;
}

onReachable((now, words) => {
  banner.hidden = now;
  banner.textContent = now ? "" : words;
  if (now && !page) show();
});

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
window.addEventListener("hashchange", show);
listen(() => page);
show();
