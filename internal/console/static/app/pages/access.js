// Who may do what? Keys: who made each, what it opens, and what it did last.
import { html, useState } from "../html.js";
import { get, path, query as encode, request } from "../api.js";
import { useData } from "../data.js";
import { capital } from "../format.js";
import { Link, setQuery, to } from "../route.js";
import { s, word } from "../strings.js";
import { Ask, Command, Copyable, Dialog, Grid, Loaded, Outcome, Page, Pager, Problem, Time } from "../ui.js";
import { line, Said } from "../untrusted.js";
import { limits, Policy } from "./policy.js";

const SCOPES = ["devices:read", "devices:write", "photos:read", "tools:call", "tools:call:user", "events:read", "jobs:read", "jobs", "webhooks", "firmware:read", "firmware", "audit:read", "audio", "broker", "admin"];
const ENDS = ["1d", "7d", "30d", "90d", "365d"];

export function Access({ tab, query }) {
  return html`<${Page} title=${s.access.title} /><nav aria-label=${s.access.title}><ul class="tabs">${Object.entries(s.access.tabs).map(([name, text]) => html`<li key=${name}><${Link} href=${to(["access", name].filter(Boolean))} aria-current=${name === tab ? "page" : null}>${text}<//></li>`)}</ul></nav>
    ${tab === "policy" ? html`<${Policy} query=${query} />` : html`<${Keys} query=${query} />`}`;
}

// opens says what a key is for, in words.
const opens = (k) => [k.scopes.includes("admin") ? word("scope", "admin") : k.scopes.map((x) => word("scope", x)).join(", "), limits(k.devices) && s.access.only(limits(k.devices)), k.tools.length > 0 && s.access.only(k.tools.join(", "))].filter(Boolean).join("; ");

function Keys({ query }) {
  const cursor = query.get("cursor") || "", c = s.access.keyColumns;
  const list = useData((signal) => get("/v1/keys" + encode({ cursor, limit: 50 }), signal), [cursor]);
  const [made, setMade] = useState(null);
  const [open, setOpen] = useState(false);
  const [told, setTold] = useState("");
  const [problem, setProblem] = useState(null);
  const revoke = (key) => async () => {
    const answer = await request("DELETE", path("v1", "keys", key.id));
    setTold(answer ? s.access.inForce(line(answer.nodes.join(", "))) : "");
    list.reload();
  };
  const end = (grant) => () => { setProblem(null); revoke(grant)().catch(setProblem); };
  const created = (key) => { setOpen(false); setMade(key); list.reload(); };
  const columns = [
    { name: c.name, text: (k) => k.id, cell: (k) => html`<${Said} text=${k.grant?.host || k.name} max=${64} />${k.grant && html` <small>${[k.grant.registered && s.access.unverified, k.grant.name && s.access.itself(line(k.grant.name, 64))].filter(Boolean).join(", ")}</small>`}<small class="second mono">${k.id}</small>`, keep: true },
    { name: c.opens, text: opens, cell: (k) => html`<span title=${k.scopes.join(", ")}><bdi>${capital(line(opens(k), 600))}</bdi></span>`, kind: "names", bare: true },
    { name: c.made, text: (k) => k.created, cell: (k) => html`${k.grant ? s.access.allowed(line(k.created_by, 64)) : k.parent ? s.access.console(line(k.parent, 60)) : k.created_by && line(k.created_by, 64)} <small><${Time} at=${k.created} /></small>` },
    { name: c.used, text: (k) => k.id, cell: (k) => (k.grant ? k.grant.used && html`${line(k.grant.address, 60)} <small><${Time} at=${k.grant.used} /></small>` : k.state === "valid" && !k.parent && html`<${LastUse} id=${k.id} />`), keep: list.data?.items.some((k) => k.grant || (k.state === "valid" && !k.parent)) },
    { name: c.state, text: (k) => word("key", k.state), cell: (k) => html`<${Outcome} tone=${k.state === "valid" ? "good" : "neutral"}>${word("key", k.state)}<//>`, bare: true },
    { name: c.ends, text: (k) => k.expires || s.access.never, cell: (k) => (k.expires ? html`<${Time} at=${k.expires} exact />` : s.access.never) },
    { name: c.change, text: () => "", cell: (k) => k.state === "valid" && (k.grant ? html`<button type="button" onClick=${end(k)}>${s.access.end}</button>` : html`<${Ask} label=${s.access.revoke} question=${s.access.revokeAsk(line(k.name))} danger act=${revoke(k)} />`), keep: true, bare: true }];
  return html`<div class="actions"><button type="button" class="primary" onClick=${() => setOpen(true)}>${s.access.create}</button><${Allow} /></div>
    ${open && html`<${NewKey} onClose=${() => setOpen(false)} onMade=${created} />`}
    ${made && html`<section class="notice warn" data-test="token"><p>${s.access.token} <bdi>${line(made.name)}</bdi></p><${Copyable} text=${made.token} /><button type="button" onClick=${() => setMade(null)}>${s.close}</button></section>`}
    <${Problem} error=${problem} />${told && html`<p class="notice" role="status">${told}</p>`}
    <section class="panel"><${Loaded} from=${list}>${({ items }) => (items.length ? html`<${Grid} columns=${columns} items=${items} id=${(k) => k.id} />` : html`<p class="blank">${s.access.noKeys}</p>`)}<//></section><p class="faint">${s.access.consoleKey}</p>
    <${Pager} next=${list.data?.next_cursor} cursor=${cursor} onCursor=${(x) => setQuery({ cursor: x })} />
    <${Command} cli=${["keys", "list"]} url="/v1/keys" />`;
}

// Allow makes a code with which a person allows an application, on the page on which it asks.
export function Allow() {
  const [made, setMade] = useState(null);
  const make = () => request("POST", "/v1/console/codes", { body: { for: "consent" } }).then(setMade, (error) => setMade({ error }));
  return html`<button type="button" onClick=${make}>${s.access.allow}</button>${made && html`<${Dialog} title=${s.access.allow} onClose=${() => setMade(null)}>
    ${made.code && html`<p>${s.access.code}</p><${Copyable} text=${made.code} />`}<${Problem} error=${made.error} /><//>`}`;
}

// LastUse is the newest entry of a key in the audit, which has calls, changes and refusals, and no reading.
function LastUse({ id }) {
  const { data } = useData((signal) => get("/v1/audit" + encode({ key: id, limit: 1 }), signal), [id]);
  if (!data) return null;
  const [last] = data.items;
  return last ? html`<${Link} href=${to(["audit"], { key: id })}><bdi>${capital(line(s.acted(last), 80))}${last.outcome !== "ok" && `: ${word("auditOutcome", last.outcome)}`}</bdi><//> <small><${Time} at=${last.at} /></small>` : html`<small>${data.next_cursor ? s.access.notLately : s.access.unused}</small>`;
}

function NewKey({ onClose, onMade }) {
  const [error, setError] = useState(null);
  const [busy, setBusy] = useState(false);
  const submit = async (event) => {
    event.preventDefault();
    const form = new FormData(event.target);
    const body = { name: form.get("name").trim(), scopes: form.getAll("scope") };
    if (form.get("devices").trim()) body.devices = form.get("devices").trim();
    const tools = form.get("tools").split("\n").map((t) => t.trim()).filter(Boolean);
    if (tools.length) body.tools = tools;
    if (form.get("expires")) body.expires = new Date(Date.now() + parseInt(form.get("expires"), 10) * 86_400_000).toISOString();
    setBusy(true);
    try {
      onMade(await request("POST", "/v1/keys", { body }));
    } catch (problem) {
      setError(problem);
      setBusy(false);
    }
  };
  return html`<${Dialog} title=${s.access.create} onClose=${onClose}><form onSubmit=${submit}>
    <div class="field"><label for="key-name">${s.access.name}</label><input id="key-name" name="name" required autofocus autocomplete="off" /></div>
    <fieldset><legend>${s.access.scopes}</legend>${SCOPES.map((scope) => html`<label class="check" key=${scope}><input type="checkbox" name="scope" value=${scope} /> <span>${capital(word("scope", scope))} <code>${scope}</code></span></label>`)}</fieldset>
    <div class="field"><label for="key-devices">${s.access.devices}</label><input id="key-devices" name="devices" placeholder="room=lab" spellcheck=${false} /></div>
    <div class="field"><label for="key-tools">${s.access.tools}</label><textarea id="key-tools" name="tools" rows="2" spellcheck=${false}></textarea></div>
    <div class="field"><label for="key-expires">${s.access.expires}</label><select id="key-expires" name="expires"><option value="">${s.access.never}</option>${ENDS.map((e) => html`<option key=${e} selected=${e === "90d"}>${e}</option>`)}</select></div>
    <${Problem} error=${error} /><div class="actions"><button class="primary" disabled=${busy}>${s.access.create}</button><button type="button" onClick=${onClose}>${s.cancel}</button></div></form><//>`;
}

