// Which metrics are shown together, and in which unit. Pure. The names: docs/metrics.md.

/** The tracks that are shown unless somebody chooses: title, unit, what belongs to it. */
const TRACKS = [
  { title: "Reward", test: (name) => /^(rows\/[^/]+\/)?reward\/(.+\/)?mean$/.test(name) },
  {
    title: "Length",
    unit: "tokens",
    test: (name) => /^completion\/length\/(mean|max)$/.test(name),
  },
  { title: "Turns", unit: "turns", test: (name) => name === "episode/turns" },
  { title: "Context", unit: "tokens", test: (name) => name === "episode/context/max" },
  { title: "Episodes' own reward", test: (name) => name === "episode/reward" },
  { title: "Episodes that outgrew the context", test: (name) => name === "episode/overflow" },
  { title: "A step of an environment", unit: "s", test: (name) => name === "env/step/seconds" },
  {
    title: "Failed steps of environments",
    unit: "steps",
    test: (name) => /^env\/(timeouts|errors)$/.test(name),
  },
  {
    title: "Waits for environments",
    unit: "s",
    test: (name) => /^time\/[^/]+\/environments$/.test(name),
  },
  { title: "Lag", unit: "versions", test: (name) => /^policy\/lag\/(mean|max)$/.test(name) },
  {
    title: "Mismatch",
    unit: "nats",
    test: (name) => /^policy\/([^/]+\/)?mismatch\/mean$/.test(name),
  },
  { title: "Loss", test: (name) => name.startsWith("loss/") },
  { title: "Evaluation", test: (name) => /^eval\/(?!initial\/)(?!.*rows$)/.test(name) },
  {
    title: "Throughput",
    unit: "tokens/s",
    test: (name) => name === "throughput/tokens_per_second",
  },
  { title: "Time of a Step", unit: "s", test: (name) => name === "time/step" },
];
const MOST = 6;

/** Tracks of the metrics that a run has: `[{title, unit, names}]`. */
export function usual(names) {
  const sorted = [...names].sort((a, b) => rank(a) - rank(b) || (a < b ? -1 : 1));
  const found = TRACKS.map((track) => ({
    ...track,
    names: sorted.filter(track.test).slice(0, MOST),
  }));
  return found.filter((track) => track.names.length);
}

/** What sums up comes first: short names, and of two the mean. */
function rank(name) {
  return name.split("/").length * 2 + (name.endsWith("/mean") ? 0 : 1);
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

/** A name without what all names of its track begin with; of a function's mean its name. */
export function shortName(name, names) {
  const parts = name.split("/");
  const others = names.map((each) => each.split("/"));
  let same = 0;
  while (same < parts.length - 1 && others.every((each) => each[same] === parts[same])) same += 1;
  const rest = parts.slice(same);
  if (parts[0] === "reward" && rest.length > 1 && rest.at(-1) === "mean") rest.pop();
  return rest.join("/");
}
