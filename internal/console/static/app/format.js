// Numbers and times as people read them. Ages are counted with the server's clock.
import { now } from "./api.js";

const UTC = "fleetd.utc";
export const utc = { get: () => localStorage.getItem(UTC) === "1", set: (on) => localStorage.setItem(UTC, on ? "1" : "0") };

const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];

// duration writes seconds with one or two units: 3 h 12 min, or in short 3 h.
export function duration(seconds, short) {
  const n = Math.max(0, Math.round(seconds));
  const at = units.findIndex(([, size]) => n >= size);
  if (at < 0) return "0 s";
  const [unit, size] = units[at];
  const whole = Math.floor(n / size);
  const next = short ? null : units[at + 1];
  const rest = next && whole < 10 ? Math.floor((n - whole * size) / next[1]) : 0;
  return rest ? `${whole} ${unit} ${rest} ${next[0]}` : `${whole} ${unit}`;
}

export function age(at) {
  const seconds = (now() - Date.parse(at)) / 1000;
  return seconds < 1.5 ? "now" : `${duration(seconds)} ago`;
}

// lasting is the time since an instant, in short.
export const lasting = (at) => duration((now() - Date.parse(at)) / 1000, true);

// since is the time of an instant of today, such as 13:02, and the day of others.
export function since(at) {
  const [day, time] = clock(at).split(" ");
  return day === clock(now()).slice(0, 10) ? time.slice(0, 5) + (utc.get() ? "Z" : "") : day;
}

// until is the time from now on to an instant.
export const until = (at) => duration((Date.parse(at) - now()) / 1000);

const pad = (n, length = 2) => String(n).padStart(length, "0");

// clock writes an instant in local time, or in UTC: 2026-11-24 02:34:17.
export function clock(at, { date = true, ms = false } = {}) {
  const d = new Date(at);
  if (Number.isNaN(d.getTime())) return "–";
  if (utc.get()) {
    const iso = d.toISOString();
    return (date ? iso.slice(0, 10) + " " : "") + iso.slice(11, ms ? 23 : 19) + "Z";
  }
  const time = `${pad(d.getHours())}:${pad(d.getMinutes())}:${pad(d.getSeconds())}${ms ? "." + pad(d.getMilliseconds(), 3) : ""}`;
  return date ? `${d.getFullYear()}-${pad(d.getMonth() + 1)}-${pad(d.getDate())} ${time}` : time;
}

// short is what suffices of the id of an image.
export const short = (id) => id.slice(0, 12);

export const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
export const count = (n) => Number(n ?? 0).toLocaleString("en");
export const plural = (n, one, many = one + "s") => `${count(n)} ${n === 1 ? one : many}`;

export function bytes(n) {
  const at = Math.min(3, Math.max(0, Math.floor(Math.log2(n || 1) / 10)));
  return `${(n / 1024 ** at).toFixed(at && n / 1024 ** at < 10 ? 1 : 0)} ${["B", "KiB", "MiB", "GiB"][at]}`;
}

export function milliseconds(n) {
  return n >= 1000 ? `${(n / 1000).toFixed(n >= 10000 ? 0 : 1)} s` : `${n < 10 ? Number(n).toFixed(1) : Math.round(n)} ms`;
}

// term writes one term of a selector; a value with a delimiter is quoted.
export const term = (name, value) => `${name}=${/[\s,()=\x22\\*<>!]/.test(value) || value === "" ? `"${value.replace(/[\x22\\*]/g, "\\$&")}"` : value}`;
