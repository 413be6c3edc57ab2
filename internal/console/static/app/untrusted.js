// Text that comes from devices or people is data: always a text node, never markup, a link, a class, an id or a
// property name. This module makes its invisible characters visible, so that it cannot disturb its surroundings.
import { html, useState } from "./html.js";
import { s } from "./strings.js";

// Controls, marks of direction, invisible and private characters. A zero-width joiner stays within an emoji.
const CONTROL = /[\u0000-\u0008\u000B-\u001F\u007F-\u009F]/g;
const INVISIBLE = /[\u00AD\u061C\u180E\u200B\u200C\u200E\u200F\u2028-\u202E\u2060-\u206F\uFEFF\uFFF9-\uFFFB]|(?<!\p{Extended_Pictographic}\uFE0F?\p{EMod}?)\u200D/gu;
const PILE = /(\p{M}{3})\p{M}+/gu;

const name = (c) => `‹U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}›`;

// visible returns text in which nothing is invisible and nothing changes direction. Newlines and tabs stay.
export function visible(text) {
  return String(text ?? "")
    .replace(CONTROL, (c) => (c < " " ? String.fromCharCode(0x2400 + c.charCodeAt(0)) : c === "\u007f" ? "␡" : name(c)))
    .replace(INVISIBLE, name)
    .replace(PILE, "$1…");
}

// line is visible on one line and at most max characters: for titles, labels and options.
export function line(text, max = 120) {
  const all = visible(text).replace(/[\n\t]+/g, " ⏎ ");
  return all.length > max ? all.slice(0, max) + "…" : all;
}

// Said shows short text in a line: names, labels, boards, versions.
export const Said = ({ text, max = 120 }) => html`<bdi class="said" lang="">${line(text, max)}</bdi>`;

const LIMIT = 600;

// Quoted shows longer text in a frame that says whose words these are. Past 600 characters it asks first.
export function Quoted({ text, pre, from = s.untrusted.device }) {
  const [all, setAll] = useState(false);
  const shown = visible(text);
  const cut = !all && shown.length > LIMIT;
  return html`<figure class="quoted">
    <figcaption>${from}</figcaption>
    <bdi class=${pre ? "said pre" : "said"} lang="">${cut ? shown.slice(0, LIMIT) + "…" : shown}</bdi>
    ${cut && html`<button type="button" class="link" onClick=${() => setAll(true)}>${s.untrusted.all(shown.length)}</button>`}
  </figure>`;
}
