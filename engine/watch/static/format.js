// Numbers as text, always with their unit.

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const LARGE = [
  [1e9, "G"],
  [1e6, "M"],
  [1e4, "k", 1e3],
];

/** A count: 950, 9,500, 12.3k, 4.56M. */
export function count(n) {
  for (const [from, unit, by = from] of LARGE)
    if (Math.abs(n) >= from) return `${digits(n / by)}${unit}`;
  return whole.format(n);
}

/** Three significant digits, without an exponent where that is short. */
export function digits(x) {
  const size = Math.abs(x);
  if (size >= 100) return x.toFixed(0);
  return size >= 10 ? x.toFixed(1) : x.toFixed(2);
}

/** Any metric's value. */
export function number(x) {
  if (x === null || x === undefined || Number.isNaN(x)) return "-";
  const size = Math.abs(x);
  if (size === 0) return "0";
  if (size >= 1e4) return count(x);
  if (size >= 100) return x.toFixed(1);
  if (size >= 1e-3) return x.toPrecision(3).replace(/\.?0+$/, "");
  return x.toExponential(1);
}

export function signed(x) {
  return x === null || x === undefined ? "-" : `${x > 0 ? "+" : ""}${number(x)}`;
}

export function percent(share) {
  return `${Math.round(share * 100)} %`;
}

export function rate(perSecond, unit) {
  const n = perSecond > 0 && perSecond < 10 ? perSecond.toFixed(1) : count(perSecond);
  return `${n} ${unit}/s`;
}

export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  for (; Math.abs(n) >= 1024 && at < units.length - 1; at += 1) n /= 1024;
  return `${at ? digits(n) : whole.format(n)} ${units[at]}`;
}

export function seconds(s) {
  if (s === null || s === undefined) return "-";
  if (s < 0.001) return s > 0 ? `${(s * 1000).toFixed(2)} ms` : "0 s";
  if (s < 1) return `${digits(s * 1000)} ms`;
  if (s < 60) return `${digits(s)} s`;
  const minutes = Math.floor(s / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(s % 60)} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48
    ? `${hours} h ${minutes % 60} min`
    : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** A Unix time, in the reader's time zone. */
export function when(unix) {
  if (!unix) return "-";
  const at = new Date(unix * 1000);
  const two = (n) => String(n).padStart(2, "0");
  const day = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
  return `${day} ${two(at.getHours())}:${two(at.getMinutes())}`;
}

export function plural(n, one, many = `${one}s`) {
  return `${count(n)} ${n === 1 ? one : many}`;
}
