// The server's drawing as elements of the page, without anything that could run.
//
// Owns: parsing, what is taken out, the index of its parts. Does not own: what is done with them.

const FORBIDDEN = "script, foreignObject, iframe, object, embed, animate, set, handler, image";
const sheets = new Set();

/** Parses an SVG text. Raises Error for what is no SVG. */
export function parsed(text) {
  const made = new DOMParser().parseFromString(withoutStyles(text), "image/svg+xml");
  const root = made.documentElement;
  if (root.localName !== "svg" || made.querySelector("parsererror")) {
    throw new Error("The server's drawing is not an SVG picture.");
  }
  for (const each of made.querySelectorAll(FORBIDDEN)) each.remove();
  for (const each of [root, ...root.querySelectorAll("*")]) clean(each);
  const drawing = document.adoptNode(root);
  drawing.setAttribute("role", "group");
  return drawing;
}

function clean(element) {
  for (const { name, value } of [...element.attributes]) {
    const leads = /^(xlink:)?href$/.test(name) && !value.startsWith("#");
    if (/^on/i.test(name) || leads) element.removeAttribute(name);
  }
}

/** Its rules become a sheet of the page: the policy refuses inline ones, even while parsing. */
function withoutStyles(text) {
  return text.replace(/<style[^>]*>([\s\S]*?)<\/style>/g, (_, rules) => {
    adopt(
      rules
        .replace(/<!\[CDATA\[|\]\]>/g, "")
        .replace(/&gt;/g, ">")
        .replace(/&quot;/g, '"'),
    );
    return "";
  });
}

function adopt(rules) {
  if (sheets.has(rules)) return;
  const sheet = new CSSStyleSheet();
  sheet.replaceSync(rules);
  sheets.add(rules);
  document.adoptedStyleSheets = [...document.adoptedStyleSheets, sheet];
}

/** The parts that have life: nodes, data edges, weight edges, cuts. */
export function indexed(drawing) {
  const all = (selector) => [...drawing.querySelectorAll(selector)];
  return {
    nodes: all("g.node").map((g) => ({ g, names: namesOf(g), id: namesOf(g)[0] })),
    edges: all("g.edge.data").map((g) => ({
      g,
      id: g.dataset.edge,
      producer: g.dataset.producer,
      consumer: g.dataset.consumer,
    })),
    weights: all("g.edge.weight").map((g) => ({ g, ...g.dataset })),
    cuts: all("g.cut").map((g) => ({ g, source: g.dataset.source })),
  };
}

function namesOf(g) {
  return (g.dataset.nodes ?? g.dataset.node ?? "").split(" ").filter(Boolean);
}

/** Where a `<g data-x data-y data-width data-height>` is. */
export function placeOf(g) {
  const [x, y, width, height] = ["x", "y", "width", "height"].map((k) => Number(g.dataset[k] ?? 0));
  return { x, y, width, height };
}
