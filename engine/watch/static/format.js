// Numbers as text, always with their unit.

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const tenths = new Intl.NumberFormat("en-US", { maximumFractionDigits: 1 });
const LARGE = [
  [1e9, "G"],
  [1e6, "M"],
];

// A number is rounded before its form is chosen: 99.96 has the form of 100, 999,600 that of 1M.

/** Its size, rounded to so many significant digits. */
function size(x, significant) {
  return Math.abs(Number(x.toPrecision(significant)));
}

/** A count: 950, 9,500, 12.3k, 4.56M. */
export function count(n) {
  for (const [from, unit] of LARGE) if (size(n, 3) >= from) return `${digits(n / from)}${unit}`;
  return Math.round(Math.abs(n)) >= 1e4 ? `${digits(n / 1e3)}k` : whole.format(n);
}

/** Three significant digits, without an exponent where that is short. */
export function digits(x) {
  const rounded = size(x, 3);
  if (rounded >= 100) return x.toFixed(0);
  return rounded >= 10 ? x.toFixed(1) : x.toFixed(2);
}

/** Any metric's value. */
export function number(x) {
  if (x === null || x === undefined || Number.isNaN(x)) return "-";
  if (x === 0) return "0";
  const oneDecimal = Number(x.toFixed(1));
  if (Math.abs(oneDecimal) >= 1e4) return count(x);
  if (size(x, 3) >= 100) return tenths.format(oneDecimal);
  if (size(x, 2) >= 1e-3) return `${Number(x.toPrecision(3))}`;
  return x.toExponential(1);
}

export function signed(x) {
  return x === null || x === undefined ? "-" : `${x > 0 ? "+" : ""}${number(x)}`;
}

export function percent(share) {
  return `${Math.round(share * 100)} %`;
}

export function rate(perSecond, unit) {
  return `${few(perSecond) ?? count(perSecond)} ${unit}/s`;
}

/** Of a number above 0 that rounds to less than 10: one decimal, or two digits of a smaller one. */
function few(n) {
  if (!(n > 0) || Number(n.toFixed(1)) >= 10) return null;
  return n < 0.095 ? `${Number(n.toPrecision(2))}` : n.toFixed(1);
}

export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  for (; Math.round(Math.abs(n)) >= 1024 && at < units.length - 1; at += 1) n /= 1024;
  return `${at ? digits(n) : whole.format(n)} ${units[at]}`;
}

export function seconds(s) {
  if (s === null || s === undefined) return "-";
  if (s < 0) return `-${seconds(-s)}`;
  if (s === 0) return "0 s";
  if (size(s, 3) < 1) return `${s < 1e-5 ? number(s * 1000) : digits(s * 1000)} ms`;
  if (Number(s.toFixed(1)) < 60) return `${digits(s)} s`;
  const minutes = Math.floor(Math.round(s) / 60);
  if (minutes < 60) return `${minutes} min ${Math.round(s) % 60} s`;
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
