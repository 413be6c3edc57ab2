// Who may do what? Keys, the rules of the tool guard, and what the rules would decide.
import { html, useEffect, useState } from "../html.js";
import { get, path, query as encode, request } from "../api.js";
import { useData } from "../data.js";
import { clock } from "../format.js";
import { Link, setQuery, to } from "../route.js";
import { s, word } from "../strings.js";
import { Ask, Command, Copyable, Dialog, Empty, flag, Loaded, Outcome, Page, Pager, Problem, Rows, Time } from "../ui.js";
import { line, Quoted, Said } from "../untrusted.js";

const SCOPES = ["devices:read", "devices:write", "photos:read", "tools:call", "tools:call:user", "events:read", "jobs:read", "jobs", "webhooks", "audio", "broker", "admin"];
const ENDS = ["1d", "7d", "30d", "90d", "365d"];

export function Access({ tab, query }) {
  return html`<${Page} title=${s.access.title} /><nav aria-label=${s.access.title}><ul class="tabs">${Object.entries(s.access.tabs).map(([name, text]) => html`<li key=${name}><${Link} href=${to(["access", name].filter(Boolean))} aria-current=${name === tab ? "page" : null}>${text}<//></li>`)}</ul></nav>
    ${tab === "policy" ? html`<${Policy} query=${query} />` : tab === "explain" ? html`<${Explain} query=${query} />` : html`<${Keys} query=${query} />`}`;
}

// limits writes the devices of a key: text, or an object with labels.
const limits = (devices) => (typeof devices === "string" ? devices : Object.entries(devices || {}).map(([name, value]) => `${name}=${value}`).join(","));

function Keys({ query }) {
  const cursor = query.get("cursor") || "";
  const list = useData((signal) => get("/v1/keys" + encode({ cursor, limit: 100 }), signal), [cursor]);
  const [made, setMade] = useState(null);
  const [open, setOpen] = useState(false);
  const [told, setTold] = useState("");
  const revoke = (key) => async () => {
    const answer = await request("DELETE", path("v1", "keys", key.id));
    setTold(answer ? s.access.inForce(line(answer.nodes.join(", "))) : "");
    list.reload();
  };
  const created = (key) => { setOpen(false); setMade(key); list.reload(); };
  return html`<div class="actions"><button type="button" class="primary" onClick=${() => setOpen(true)}>${s.access.create}</button></div>
    ${open && html`<${NewKey} onClose=${() => setOpen(false)} onMade=${created} />`}
    ${made && html`<section class="notice warn" data-test="token"><p>${s.access.token} <bdi>${line(made.name)}</bdi></p><${Copyable} text=${made.token} /><button type="button" onClick=${() => setMade(null)}>${s.close}</button></section>`}
    ${told && html`<p class="notice" role="status">${told}</p>`}<p class="faint">${s.access.consoleKey}</p>
    <${Loaded} from=${list}>${({ items }) => (items.length ? html`<${Rows} columns=${[...s.access.keyColumns, s.access.revoke]}>${items.map((k) => html`<tr key=${k.id}>
      <td class="first"><${Said} text=${k.name} max=${60} /> <small>${k.id}</small></td><td class="names">${line(k.scopes.join(", "), 200)}</td><td><bdi>${line(limits(k.devices) || s.jobs.allDevices, 100)}</bdi></td><td class="names"><bdi>${line(k.tools.join(", ") || s.tools.back, 100)}</bdi></td>
      <td><${Outcome} tone=${k.state === "valid" ? "good" : "neutral"}>${word("key", k.state)}<//></td><td>${k.expires ? html`<${Time} at=${k.expires} exact />` : s.access.never}</td>
      <td>${k.state === "valid" && html`<${Ask} label=${s.access.revoke} question=${s.access.revokeAsk(line(k.name))} danger act=${revoke(k)} />`}</td></tr>`)}<//>` : html`<${Empty}>${s.access.noKeys}<//>`)}<//>
    <${Pager} next=${list.data?.next_cursor} cursor=${cursor} onCursor=${(c) => setQuery({ cursor: c })} />
    <${Command} cli=${["keys", "list"]} url="/v1/keys" />`;
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
    <fieldset><legend>${s.access.scopes}</legend>${SCOPES.map((scope) => html`<label class="check" key=${scope}><input type="checkbox" name="scope" value=${scope} /> ${scope}</label>`)}</fieldset>
    <div class="field"><label for="key-devices">${s.access.devices}</label><input id="key-devices" name="devices" placeholder="room=lab" spellcheck=${false} /></div>
    <div class="field"><label for="key-tools">${s.access.tools}</label><textarea id="key-tools" name="tools" rows="2" spellcheck=${false}></textarea></div>
    <div class="field"><label for="key-expires">${s.access.expires}</label><select id="key-expires" name="expires"><option value="">${s.access.never}</option>${ENDS.map((e) => html`<option key=${e} selected=${e === "90d"}>${e}</option>`)}</select></div>
    <${Problem} error=${error} /><div class="actions"><button class="primary" disabled=${busy}>${s.access.create}</button><button type="button" onClick=${onClose}>${s.cancel}</button></div></form><//>`;
}

// document leaves out what the API adds to a policy.
const document_ = ({ version, changed, by, warnings, ...rest }) => JSON.stringify(rest, null, 2);

// EXAMPLE is a rule to begin with.
const EXAMPLE = JSON.stringify({ rules: [{ name: "ask before a photo", tools: ["self.camera.*"], action: "confirm" }] }, null, 2);

function Policy({ query }) {
  const policy = useData((signal) => get("/v1/policy", signal), []);
  const versions = useData((signal) => get("/v1/policy/versions" + encode({ limit: 100 }), signal), [policy.data?.version]);
  const [edit, setEdit] = useState(null); // {base, text}
  const [message, setMessage] = useState("");
  const [error, setError] = useState(null);
  useEffect(() => { if (policy.data) setEdit((e) => e ?? { base: policy.data.version, text: document_(policy.data) }); }, [policy.data]);
  const save = async (event) => {
    event.preventDefault();
    setError(null);
    setMessage("");
    try {
      const written = JSON.parse(edit.text);
      const saved = await request("PUT", "/v1/policy", { body: JSON.stringify(written), headers: { "If-Match": `"${edit.base}"` } });
      setEdit({ base: saved.version, text: document_(saved) });
      setMessage([s.access.saved(saved.version), ...(saved.warnings || [])].join(" "));
      policy.reload();
    } catch (problem) {
      if (problem.status === 409 || problem.status === 412) setMessage(s.access.conflict);
      setError(problem);
    }
  };
  const load = async () => {
    const fresh = await get("/v1/policy");
    setEdit({ base: fresh.version, text: document_(fresh) });
    setError(null);
    setMessage("");
  };
  const old = query.get("version");
  return html`<p>${s.access.policyLead}</p>
    <details><summary>${s.access.example}</summary><p>${s.access.exampleLead}</p><${Copyable} text=${EXAMPLE} /></details>
    ${edit && html`<form class="card" onSubmit=${save}><div class="field wide-field"><label for="policy">${s.access.version(edit.base)}</label><textarea id="policy" class="mono" rows="16" spellcheck=${false} value=${edit.text} onInput=${(e) => setEdit({ ...edit, text: e.target.value })}></textarea></div>
      ${message && html`<p role="status">${line(message, 400)}</p>`}<${Problem} error=${error} /><div class="actions"><button class="primary">${s.save}</button><button type="button" onClick=${load}>${s.refresh}</button></div></form>`}
    <section class="card"><h2>${s.access.versions}</h2><${Loaded} from=${versions}>${({ items }) => html`<ol class="log">${items.map((v) => html`<li key=${v.version}><span>${clock(v.changed)}</span><span><${Link} href=${to(["access", "policy"], { version: String(v.version) })}>${s.access.version(v.version)}<//> ${line(v.by ?? "", 60)}</span></li>`)}</ol>`}<//>
      ${old && policy.data && html`<${PolicyDifference} version=${old} current=${policy.data} />`}</section>
    <${Command} cli=${["policy", "show", "--json"]} url="/v1/policy" />`;
}

function PolicyDifference({ version, current }) {
  const past = useData((signal) => get(path("v1", "policy", "versions", version), signal), [version]);
  return html`<${Loaded} from=${past}>${(p) => html`<h3>${s.access.compare}</h3><pre class="lines" data-test="lines">${differences(document_(p).split("\n"), document_(current).split("\n")).map(([sign, text], i) => html`<span key=${i} class=${{ "+": "good", "-": "bad" }[sign] || ""}>${sign} ${line(text, 300)}${"\n"}</span>`)}</pre>`}<//>`;
}

// differences is the shortest way from one list of lines to another: pairs of " ", "-" or "+" and a line.
export function differences(from, to_) {
  const rows = from.length + 1, width = to_.length + 1;
  const common = new Uint32Array(rows * width);
  for (let i = from.length - 1; i >= 0; i--) for (let j = to_.length - 1; j >= 0; j--) common[i * width + j] = from[i] === to_[j] ? common[(i + 1) * width + j + 1] + 1 : Math.max(common[(i + 1) * width + j], common[i * width + j + 1]);
  const out = [];
  for (let i = 0, j = 0; i < from.length || j < to_.length;) {
    if (i < from.length && j < to_.length && from[i] === to_[j]) { out.push([" ", from[i++]]); j++; }
    else if (j === to_.length || (i < from.length && common[(i + 1) * width + j] >= common[i * width + j + 1])) out.push(["-", from[i++]]);
    else out.push(["+", to_[j++]]);
  }
  return out;
}

const WAYS = ["rest", "mcp", "nats", "voice", "gateway"];

function Explain({ query }) {
  const asked = Object.fromEntries(["key", "device", "tool", "via"].map((name) => [name, query.get(name) || ""]));
  const ready = asked.key && asked.tool;
  const found = useData((signal) => (ready ? get("/v1/policy/explain" + encode(asked), signal) : Promise.resolve(null)), [JSON.stringify(asked)]);
  const submit = (event) => {
    event.preventDefault();
    setQuery(Object.fromEntries([...new FormData(event.target)].map(([name, value]) => [name, value.trim()])));
  };
  return html`<form class="card" onSubmit=${submit}><div class="row">${["key", "device", "tool"].map((name) => html`<label key=${name}>${s.access[name]}<input name=${name} defaultValue=${asked[name]} required spellcheck=${false} /></label>`)}
      <label>${s.access.via}<select name="via" defaultValue=${asked.via}>${WAYS.map((w) => html`<option key=${w} selected=${w === asked.via}>${w}</option>`)}</select></label><button class="primary">${s.access.explain}</button></div></form>
    <${Problem} error=${found.error} />${found.data && html`<section class="card"><p><${Outcome} tone=${found.data.action === "allow" ? "good" : found.data.action === "deny" ? "bad" : "neutral"}>${line(found.data.action, 20)}<//> <code>${line(found.data.rule ?? "", 60)}</code> ${line(found.data.detail ?? "", 300)}</p>
      <${Rows} columns=${s.access.steps}>${(found.data.steps || []).map((x, i) => html`<tr key=${i}><td class="first"><bdi>${line(x.rule, 60)}</bdi></td><td>${line(x.verdict, 40)} ${x.action && html`<small>${x.action}</small>`}</td><td>${line(x.why ?? "", 200)}</td></tr>`)}<//></section>`}
    ${ready && html`<${Command} cli=${["policy", "explain", asked.key, asked.device, asked.tool, ...flag("--via", asked.via)]} url=${"/v1/policy/explain" + encode(asked)} />`}`;
}
