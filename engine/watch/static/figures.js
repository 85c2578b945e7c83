// Figures of a Flow, folded by node, edge and Model. Pure; the names are those of records.py.

/** What a replica does with its time, in the order of the bar, and in words. */
export const STATES = {
  busy: "busy",
  for_rows: "waits for rows",
  for_weights: "waits for weights",
  for_turn: "waits for its turn",
  for_room: "waits for room",
  for_outside: "waits outside (environments)",
  idle: "idle",
};
const SHORT = {
  busy: "busy",
  for_rows: "no rows",
  for_weights: "weights",
  for_turn: "turn",
  for_room: "no room",
  for_outside: "outside",
  idle: "idle",
};
const NAMES = Object.keys(STATES);

/** The length of a Flow in seconds, never 0. */
export function lengthOf(flow) {
  return Math.max(1e-9, (flow.end ?? 0) - (flow.start ?? 0));
}

/** Shares of a time by state; they add up to 1 unless there is none. */
export function sharesOf(replicas) {
  const sums = Object.fromEntries(NAMES.map((name) => [name, 0]));
  for (const each of replicas) for (const name of NAMES) sums[name] += each[name] ?? 0;
  const all = NAMES.reduce((sum, name) => sum + sums[name], 0);
  if (all > 0) for (const name of NAMES) sums[name] /= all;
  return sums;
}

/** Figures of each node: shares, rows and tokens a second, version, its replicas. */
export function byNode(flow) {
  const found = new Map();
  for (const [key, replica] of Object.entries(flow.nodes ?? {})) {
    const at = key.lastIndexOf("@");
    const [name, worker] = at < 0 ? [key, ""] : [key.slice(0, at), key.slice(at + 1)];
    if (!found.has(name)) found.set(name, []);
    found.get(name).push({ worker, ...replica });
  }
  const length = lengthOf(flow);
  return new Map([...found].map(([name, replicas]) => [name, folded(replicas, length)]));
}

/** Several nodes' or replicas' figures as one. */
export function folded(replicas, length) {
  const sum = (name) => replicas.reduce((total, each) => total + (each[name] ?? 0), 0);
  const versions = replicas.map((each) => each.version ?? -1).filter((v) => v >= 0);
  return {
    replicas,
    length,
    shares: sharesOf(replicas),
    rows: sum("rows") / length,
    tokens: sum("tokens") / length,
    inFlight: sum("in_flight"),
    version: versions.length ? Math.min(...versions) : null,
  };
}

/** The state that has most of the time besides busy and idle, as `[name, share]`, if any. */
export function greatestWait(shares) {
  const waits = NAMES.slice(1, -1).map((name) => [name, shares[name]]);
  waits.sort((a, b) => b[1] - a[1]);
  return waits[0][1] > 0.005 ? waits[0] : null;
}

/** One line for a node's strip: its greatest share first. */
export function headline(shares) {
  const wait = greatestWait(shares);
  if (wait && wait[1] > shares.busy && wait[1] >= shares.idle) return ["wait", ...wait];
  return shares.busy >= shares.idle ? ["busy", "busy", shares.busy] : ["idle", "idle", shares.idle];
}

export function shortState(name) {
  return SHORT[name];
}

/** All shares in words, such as `busy 61 %, waits for rows 20 %`. */
export function inWords(shares, percent) {
  const shown = NAMES.filter((name) => shares[name] >= 0.005);
  return shown.map((name) => `${STATES[name]} ${percent(shares[name])}`).join(", ");
}

/** Figures by the id of a drawn edge. Rows that pass nodes by (a prompt's answer goes straight to
 * a reward that was drawn behind generation) count to the drawn edge that they go beside.
 * edges: `{id, producer, consumer}` of what is drawn.
 */
export function byEdge(flow, edges) {
  const moved = Object.entries(flow.edges ?? {});
  const found = new Map(edges.map(({ id }) => [id, flow.edges?.[id]]));
  for (const [id, figures] of moved) {
    if (found.has(id)) continue;
    const beside = besideOf(id, edges);
    if (beside) found.set(beside, together(found.get(beside), figures));
  }
  return found;
}

/** The drawn edge that the rows of one that is not drawn go beside, if there is one. */
export function besideOf(id, edges) {
  const [producer, consumer] = id.split("->");
  const into = edges.filter((edge) => edge.consumer === consumer);
  const over = into.find((edge) => reaches(producer, edge.producer, edges, new Set()));
  return (over ?? into[0])?.id;
}

function reaches(from, to, edges, seen) {
  if (from === to) return true;
  if (seen.has(to)) return false;
  seen.add(to);
  return edges.some((edge) => edge.consumer === to && reaches(from, edge.producer, edges, seen));
}

function together(a, b) {
  if (!a) return b;
  const most = (name) => Math.max(a[name] ?? 0, b[name] ?? 0);
  const sum = (name) => (a[name] ?? 0) + (b[name] ?? 0);
  return {
    ...a,
    rows: most("rows"),
    bytes: sum("bytes"),
    waiting_rows: most("waiting_rows"),
    waiting_bytes: sum("waiting_bytes"),
    age: most("age"),
  };
}

/** Weight edges by `model->reader`: newest offered, oldest loaded, loads and bytes of all. */
export function byWeight(flow) {
  const found = new Map();
  for (const [key, edge] of Object.entries(flow.weights ?? {})) {
    const name = key.replace(/@[^@]*$/, "");
    const one = found.get(name) ?? { offered: 0, loaded: Infinity, loads: 0, seconds: 0, bytes: 0 };
    one.offered = Math.max(one.offered, edge.offered ?? 0);
    one.loaded = Math.min(one.loaded, edge.loaded ?? 0);
    for (const sum of ["loads", "seconds", "bytes"]) one[sum] += edge[sum] ?? 0;
    found.set(name, one);
  }
  return found;
}
