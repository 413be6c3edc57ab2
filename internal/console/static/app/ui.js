// What the pages share: titles, problems, tables of facts, dialogs, times.
import { html, useEffect, useLayoutEffect, useRef, useState } from "./html.js";
import { ApiError } from "./api.js";
import { age, clock, lasting, since } from "./format.js";
import { Link, to } from "./route.js";
import { s, word } from "./strings.js";
import { line, Said } from "./untrusted.js";

let first = true;

// Page has the only h1, which gets the focus when one comes from another page.
export function Page({ title, lead, children }) {
  const heading = useRef(null);
  useEffect(() => { document.title = `${line(title, 80)} · fleetd`; }, [title]);
  useEffect(() => {
    if (!first) heading.current.focus();
    first = false;
  }, []);
  return html`<header class="head"><h1 tabindex="-1" ref=${heading}><bdi>${line(title, 300)}</bdi></h1>${lead}</header>${children}`;
}

// Problem is the API's sentence, with its code and the id of the call.
export function Problem({ error, children }) {
  if (!error) return null;
  const { code, call, part } = error.problem || {};
  return html`<div class="problem" role="alert">
    <p><strong>${s.problem.title(error.status)}</strong> ${line(error.message, 400)}</p>
    <p class="faint">${code && html`<code>${code}</code> `}${part && s.problem.part(part)}
      ${call && html` <${Link} href=${`/console/calls/${call}`}>${s.problem.why}<//>`}</p>
    ${(error.status === 503 || error.status === 0) && html`<p class="faint">${s.problem.retrying}</p>`}
    ${children}
  </div>`;
}

// Denied is in place of what a key has no scope for.
export const Denied = ({ scope }) => html`<${Problem} error=${new ApiError(403, { detail: s.problem.scope(scope), code: "forbidden" })} />`;

// Loaded shows what useData has: an error, a sign that it takes long, or the data, with its age if it is old.
export function Loaded({ from, children }) {
  const { data, error, slow, at } = from;
  return html`${error && html`<${Problem} error=${error}>${data && html`<p>${s.problem.old(clock(at, { date: false }))}</p>`}<//>`}
    ${data ? children(data) : !error && slow && html`<p class="notice" role="status">${s.loading}</p>`}`;
}

export const Time = ({ at, exact }) => (at ? html`<time datetime=${at} title=${at}>${exact ? clock(at) : age(at)}</time>` : "–");

// State never speaks by colour alone: a sign and a word.
const SIGNS = { online: "●", offline: "○", pending: "◐", contested: "▲" };
export const State = ({ state }) => html`<span class=${"state " + (state in SIGNS ? state : "")}><span aria-hidden="true">${SIGNS[state] || "•"}</span> ${line(word("state", state), 20)}</span>`;

// standing says for how long a device has its state, and why: for 3 h, or since 13:02, lost power or network.
export function standing(d) {
  if (d.state === "online") return [d.connected_at && s.devices.online(lasting(d.connected_at)), d.mcp.state !== "ready" && word("mcp", d.mcp.state)].filter(Boolean).join(", ");
  return d.state === "offline" ? s.devices.offline(d.offline_since && since(d.offline_since), word("reason", d.offline_reason)) : "";
}

// readLabels reads labels as name=value, one per line; -name removes one, and so does the list of those before.
export function readLabels(text, before = []) {
  const labels = new Map(before.map((name) => [name, null]));
  for (const row of text.split("\n").map((r) => r.trim()).filter(Boolean)) {
    const at = row.indexOf("=");
    if (at < 1 && row[0] === "-") labels.set(row.slice(1).trim(), null);
    else if (at < 1) throw new ApiError(422, { detail: s.device.labelFault(row) });
    else labels.set(row.slice(0, at).trim(), row.slice(at + 1).trim());
  }
  return Object.fromEntries(labels);
}

// Outcome is a word of a closed list with a tone: good, bad or neutral.
export const Outcome = ({ tone, children }) => html`<span class=${"outcome " + tone}>${{ good: "✓", bad: "✕", neutral: "•" }[tone]} ${children}</span>`;

// Facts is a list of names and values; empty values are left out.
export const Facts = ({ items }) => html`<dl class="facts">${items.filter(([, value]) => value !== "" && value != null && value !== false)
  .map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;

// Rows is a table; on a phone each row is a block. A column is its name, or a whole header.
export const Rows = ({ columns, kind = "", children }) => html`<div class="scroll" tabindex="0" role="region" aria-label=${s.table}><table class=${`rows ${kind}`}>
  <thead><tr>${columns.map((c) => (typeof c === "string" ? html`<th scope="col" key=${c}>${c}</th>` : c))}</tr></thead><tbody>${children}</tbody></table></div>`;

// Grid is a table of items. A column is {name, text, cell}: text tells rows apart, cell is what is shown if that is not the text; keep
// keeps a column in which all rows are alike; kind is a class, right for numbers. What is the same in all rows is said once, below them.
export function Grid({ columns, items, id, kind }) {
  const text = (c, x) => String(c.text(x) ?? "");
  const alike = columns.filter((c) => !c.keep && items.every((x) => text(c, x) === text(c, items[0])) && (items.length > 1 || !text(c, items[0])));
  const shown = columns.filter((c) => !alike.includes(c)), same = alike.filter((c) => text(c, items[0]));
  const cell = (c, x) => (c.cell ? c.cell(x) : html`<bdi>${line(text(c, x), 300)}</bdi>`);
  return html`<${Rows} kind=${kind} columns=${shown.map((c) => (c.kind === "right" ? html`<th scope="col" class="right" key=${c.name}>${c.name}</th>` : c.name))}>${items.map((x) => html`<tr key=${id(x)} data-row=${id(x)}>${shown.map((c, i) =>
    html`<td key=${c.name} data-name=${c.bare ? null : c.name} class=${i ? c.kind : "first"}>${(c.bare || text(c, x)) && cell(c, x)}</td>`)}</tr>`)}<//>
    ${same.length > 0 && html`<p class="told faint alike">${s.alike} ${same.map((c, i) => html`<span key=${c.name}>${i > 0 && " · "}${c.name}: ${cell(c, items[0])}</span>`)}</p>`}`;
}

// Panel has a title, and a link to more.
export const Panel = ({ title, more, children, ...rest }) => html`<section class="panel" ...${rest}><header><h2>${title}</h2>${more && html`<${Link} href=${more} aria-label=${`${title}: ${s.more}`}>${s.more}<//>`}</header>${children}</section>`;

export const Empty = ({ children }) => html`<p class="empty">${children}</p>`;

// Dialog is modal and returns the focus by itself. Escape and the button cancel.
export function Dialog({ title, onClose, children }) {
  const dialog = useRef(null);
  useLayoutEffect(() => {
    const before = document.activeElement, node = dialog.current;
    node.showModal();
    return () => {
      node.close(); // while it is open nothing else takes the focus
      if (before?.isConnected) before.focus();
    };
  }, []);
  return html`<dialog ref=${dialog} aria-labelledby="dialog-title" onCancel=${(event) => { event.preventDefault(); onClose?.(); }}>
    <h2 id="dialog-title">${title}</h2>${children}</dialog>`;
}

// Ask is a button that asks before it acts: with a text to type, if phrase is given. It acts once.
export function Ask({ label, question, phrase, danger, disabled, act }) {
  const [open, setOpen] = useState(false);
  const [typed, setTyped] = useState("");
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState(null);
  const close = () => { setOpen(false); setTyped(""); setError(null); };
  const submit = async (event) => {
    event.preventDefault();
    if (busy) return;
    setBusy(true);
    try {
      await act();
      close();
    } catch (problem) {
      setError(problem);
    } finally {
      setBusy(false);
    }
  };
  return html`<button type="button" class=${danger ? "danger" : ""} disabled=${disabled} onClick=${() => setOpen(true)}>${label}</button>
    ${open && html`<${Dialog} title=${label} onClose=${close}>
      <form onSubmit=${submit}>
        <p>${question}</p>
        ${phrase && html`<label>${s.ask.type(line(phrase))}<input autofocus autocomplete="off" value=${typed} onInput=${(e) => setTyped(e.target.value)} /></label>`}
        <${Problem} error=${error} />
        <div class="actions"><button class=${danger ? "danger" : "primary"} disabled=${busy || (phrase && typed !== phrase)}>${label}</button>
          <button type="button" onClick=${close}>${s.ask.back}</button></div>
      </form>
    <//>`}`;
}

// Act is a button that acts at once and shows what went wrong beside itself. While it acts it keeps the focus, as a
// disabled one would not.
export function Act({ label, name, act, primary, disabled }) {
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState(null);
  const click = async () => {
    if (busy) return;
    setBusy(true);
    setError(null);
    try {
      await act();
    } catch (problem) {
      setError(problem);
    } finally {
      setBusy(false);
    }
  };
  return html`<button type="button" class=${primary ? "primary" : ""} disabled=${disabled} aria-disabled=${busy ? "true" : null} aria-label=${name} onClick=${click}>${label}</button><${Problem} error=${error} />`;
}

// Pause holds the rows of a feed back, and counts those that wait.
export const Pause = ({ feed }) => html`<button type="button" onClick=${feed.toggle}>${feed.paused ? `${s.feed.resume} (${s.feed.waiting(feed.held)})` : s.feed.pause}</button>`;

// Parts of a command come from URLs and devices.
const quote = (text) => (/^[\w:.,=@%+/-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

export const flag = (name, value) => (value ? [name, value] : []);

// Command shows what would do the same on the command line. Copying by script needs a secure context.
export function Command({ cli, method = "GET", url, body }) {
  const curl = url && `curl -H "Authorization: Bearer $FLEETD_KEY"${method === "GET" ? "" : ` -X ${method}`}${body ? ` -d ${quote(JSON.stringify(body))}` : ""} ${quote(location.origin + url)}`;
  return html`<details><summary>${s.command.title}</summary>
    ${[cli && ["fleetd", ...cli].map(quote).join(" "), curl].filter(Boolean).map((text) => html`<${Copyable} key=${text} text=${text} />`)}</details>`;
}

export function Copyable({ text }) {
  const field = useRef(null);
  const copy = () => {
    if (navigator.clipboard) navigator.clipboard.writeText(text);
    else getSelection().selectAllChildren(field.current);
  };
  return html`<div class="copyable"><code ref=${field}>${text}</code>
    <button type="button" onClick=${copy}>${navigator.clipboard ? s.command.copy : s.command.select}</button></div>`;
}

// Pages links to the next page of a list, and to the first from all others.
export const Pager = ({ next, onCursor, cursor }) => (next || cursor) && html`<nav class="pager" aria-label=${s.pager.label}>
  ${cursor && html`<button type="button" onClick=${() => onCursor("")}>${s.pager.first}</button>`}
  ${next && html`<button type="button" onClick=${() => onCursor(next)}>${s.pager.next}</button>`}</nav>`;

export const Labels = ({ labels }) => Object.entries(labels || {}).map(([name, value]) => html`<${LabelLink} key=${name} name=${name} value=${value} />`);

// LabelLink leads to the devices with the same label.
export const LabelLink = ({ name, value, max = 60 }) => html`<${Link} class="label" href=${to(["devices"], { label: `${name}=${value}` })}>${line(`${name}=${value}`, max)}<//>`;

// JobLinks lead to a new job on some devices.
export const JobLinks = ({ ids }) => ["message", "restart", "job"].map((kind) => html`<${Link} key=${kind} class="button" href=${to(["jobs", "new"], { kind: kind !== "job" && kind, devices: ids.join() })}>${s.devices[kind]}<//>`);
