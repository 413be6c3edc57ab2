// What changed in a device's tools: its stored lists, compared tool by tool.
import { html } from "../html.js";
import { get, path, query as encode } from "../api.js";
import { useData } from "../data.js";
import { clock } from "../format.js";
import { Link, setQuery, to } from "../route.js";
import { s } from "../strings.js";
import { Empty, Loaded, Pager } from "../ui.js";
import { line, Quoted, Said } from "../untrusted.js";

export function Catalogs({ device, query }) {
  const cursor = query.get("cursor") || "";
  const versions = useData((signal) => get(path("v1", "devices", device.id, "catalogs") + encode({ limit: 100, cursor }), signal), [device.id, cursor, device.mcp.catalog]);
  return html`<${Loaded} from=${versions}>${({ items, next_cursor: next }) => {
    if (!items.length) return html`<${Empty}>${s.catalog.none}<//>`;
    const known = (sha) => items.some((v) => v.catalog === sha) && sha;
    const newer = known(query.get("new")) || items[0].catalog;
    const older = known(query.get("old")) || items.find((v) => v.catalog !== newer)?.catalog || "";
    const choice = (name, value) => html`<select aria-label=${name === "new" ? s.catalog.compare : s.catalog.with} value=${value} onChange=${(e) => setQuery({ [name]: e.target.value, cursor })}>
      ${items.map((v, i) => html`<option key=${i} value=${v.catalog}>${`${clock(v.since)} · ${line(v.firmware, 20)} · ${v.catalog.slice(0, 6)}`}</option>`)}</select>`;
    return html`<div><label>${s.catalog.compare}${choice("new", newer)}</label><label>${s.catalog.with}${choice("old", older || newer)}</label></div>
      ${older ? html`<${Difference} newer=${newer} older=${older} />` : html`<${Empty}>${s.catalog.one}<//>`}
      <${Pager} next=${next} cursor=${cursor} onCursor=${(c) => setQuery({ cursor: c })} />`;
  }}<//>`;
}

function Difference({ newer, older }) {
  const both = useData((signal) => Promise.all([newer, older].map((sha) => get(path("v1", "catalogs", sha), signal))), [newer, older]);
  return html`<${Loaded} from=${both}>${([after, before]) => {
    const changes = compare(before.items, after.items);
    return changes.length ? html`<div class="diff" data-test="diff">${changes.map(({ kind, name, from, to: now }) => html`<section class="card" key=${kind + name}><h3>${s.catalog[kind]}: <${Said} text=${name} /></h3>
      ${from && html`<${Quoted} pre from=${s.catalog.removed} text=${from} />`}${now && html`<${Quoted} pre from=${s.catalog.added} text=${now} />`}
      ${kind !== "removed" && html`<${Link} href=${to(["devices"], { select: `tool=${JSON.stringify(name)}` })}>${s.catalog.who}<//>`}</section>`)}</div>` : html`<${Empty}>${s.catalog.same}<//>`;
  }}<//>`;
}

// compare lists tools that were added, removed or changed, by name; of a changed one only the members that differ.
export function compare(before, after) {
  const named = (items) => new Map(items.map((tool) => [String(tool?.name), tool]));
  const old = named(before), fresh = named(after);
  const text = (value) => JSON.stringify(value, null, 2);
  const changes = [];
  for (const [name, tool] of fresh) {
    if (!old.has(name)) changes.push({ kind: "added", name, to: text(tool) });
    else if (text(old.get(name)) !== text(tool)) changes.push({ kind: "changed", name, ...differing(old.get(name), tool, text) });
  }
  for (const [name, tool] of old) if (!fresh.has(name)) changes.push({ kind: "removed", name, from: text(tool) });
  return changes;
}

function differing(from, to_, text) {
  const members = [...new Set([...Object.keys(from), ...Object.keys(to_)])].filter((name) => text(from[name]) !== text(to_[name]));
  const side = (tool) => members.filter((name) => Object.hasOwn(tool, name)).map((name) => `${name}: ${text(tool[name])}`).join("\n");
  return { from: side(from), to: side(to_) };
}
