// Which metrics are shown together, and in which unit. Pure. The names: docs/metrics.md.

/** The tracks that are shown unless somebody chooses: title, unit, what belongs to it. */
const TRACKS = [
  { title: "Reward", test: (name) => /^reward\/(.+\/)?mean$/.test(name) },
  { title: "Length", unit: "tokens", test: (name) => /^completion\/length\/(mean|max)$/.test(name) },
  { title: "Lag", unit: "versions", test: (name) => /^policy\/lag\/(mean|max)$/.test(name) },
  { title: "Mismatch", unit: "nats", test: (name) => name === "policy/mismatch/mean" },
  { title: "Loss", test: (name) => name.startsWith("loss/") },
  { title: "Evaluation", test: (name) => /^eval\/(?!initial\/)(?!.*rows$)/.test(name) },
  { title: "Throughput", unit: "tokens/s", test: (name) => name === "throughput/tokens_per_second" },
  { title: "Step", unit: "s", test: (name) => name === "time/step" },
];
const MOST = 6;

/** Tracks of the metrics that a run has: `[{title, unit, names}]`. */
export function usual(names) {
  const found = TRACKS.map((track) => ({ ...track, names: names.filter(track.test).slice(0, MOST) }));
  return found.filter((track) => track.names.length);
}

/** Tracks of chosen metrics: those of one group together. */
export function chosenTracks(names) {
  const groups = new Map();
  for (const name of names) {
    const known = TRACKS.find((track) => track.test(name));
    const title = known?.title ?? name.split("/").slice(0, 2).join("/");
    const unit = known?.unit ?? unitOf(name);
    if (!groups.has(title)) groups.set(title, { title, unit, names: [] });
    groups.get(title).names.push(name);
  }
  return [...groups.values()].flatMap(split);
}

/** A track has at most as many lines as there are colours. */
function split(track) {
  const parts = [];
  for (let at = 0; at < track.names.length; at += MOST) {
    parts.push({ ...track, names: track.names.slice(at, at + MOST) });
  }
  return parts;
}

function unitOf(name) {
  if (name.startsWith("time/")) return "s";
  if (name.endsWith("/bytes")) return "bytes";
  if (/tokens$/.test(name)) return "tokens";
  return "";
}

/** Names by what comes before the first slash, sorted. */
export function byPrefix(names) {
  const groups = new Map();
  for (const name of [...names].sort()) {
    const prefix = name.split("/")[0];
    if (!groups.has(prefix)) groups.set(prefix, []);
    groups.get(prefix).push(name);
  }
  return groups;
}

/** What is left of a name beside its track's title. */
export function shortName(name, title) {
  const parts = name.split("/");
  const rest = parts[0] === title.toLowerCase() ? parts.slice(1) : parts;
  if (parts[0] === "reward" && rest.length > 1 && rest.at(-1) === "mean") rest.pop();
  return rest.join("/") || name;
}
