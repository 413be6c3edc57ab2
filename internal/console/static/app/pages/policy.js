// Which rule decides? The rules of the tool guard in their order, the same document as JSON beside them, and what the rules in force
// decide about a call.
import { html, useEffect, useState } from "../html.js";
import { get, path, query as encode, request } from "../api.js";
import { useData } from "../data.js";
import { capital, clock } from "../format.js";
import { Link, setQuery, to } from "../route.js";
import { s, word } from "../strings.js";
import { Command, Dialog, flag, Grid, Loaded, Outcome, Panel, Problem } from "../ui.js";
import { line } from "../untrusted.js";

const WAYS = ["rest", "raw", "nats", "gateway", "voice", "mcp", "job"];
const RULE_WAYS = WAYS.slice(0, -1);
const ACTIONS = ["allow", "confirm", "deny"];
const TONES = { allow: "good", deny: "bad" };

const p = s.policy;

// limits writes the devices of a key: text, or an object with labels.
export const limits = (devices) => (typeof devices === "string" ? devices : Object.entries(devices || {}).map(([name, value]) => `${name}=${value}`).join(","));

// document leaves out what the API adds to a policy.
const document_ = ({ version, changed, by, warnings, ...rest }) => JSON.stringify(rest, null, 2);

// read returns the document of a text, or null if it is none.
function readDocument(text) {
  try {
    const doc = JSON.parse(text);
    return doc && typeof doc === "object" && Array.isArray(doc.rules ?? []) && (doc.rules ?? []).every((r) => r && typeof r === "object") ? doc : null;
  } catch {
    return null;
  }
}

export function Policy({ query }) {
  const policy = useData((signal) => get("/v1/policy", signal), []);
  const versions = useData((signal) => get("/v1/policy/versions" + encode({ limit: 100 }), signal), [policy.data?.version]);
  const [edit, setEdit] = useState(null); // {base, text, saved}
  const [open, setOpen] = useState(null); // the place of the rule that a dialog is about
  const [message, setMessage] = useState("");
  const [error, setError] = useState(null);
  const take = (fresh) => setEdit({ base: fresh.version, text: document_(fresh), saved: document_(fresh) });
  useEffect(() => { if (policy.data && !edit) take(policy.data); }, [policy.data]);
  const save = async (event) => {
    event.preventDefault();
    setError(null);
    setMessage("");
    try {
      const written = JSON.parse(edit.text);
      const saved = await request("PUT", "/v1/policy", { body: JSON.stringify(written), headers: { "If-Match": `"${edit.base}"` } });
      take(saved);
      setMessage([p.saved(saved.version), ...(saved.warnings || [])].join(" "));
      policy.reload();
    } catch (problem) {
      if (problem.status === 409 || problem.status === 412) setMessage(p.conflict);
      setError(problem);
    }
  };
  const load = async () => { take(await get("/v1/policy")); setError(null); setMessage(""); };
  const doc = edit && readDocument(edit.text), rules = doc?.rules || [];
  const change = (next) => { setEdit({ ...edit, text: JSON.stringify({ ...doc, rules: next }, null, 2) }); setMessage(""); setOpen(null); };
  const move = (i, by) => change(rules.toSpliced(i, 1).toSpliced(i + by, 0, rules[i]));
  const old = query.get("version");
  return html`<p>${p.lead}</p>
    <div class="cols"><div class="stack"><${Panel} title=${p.rules}>
      ${edit && (!doc ? html`<p class="told bad">${p.unreadable}</p>` : html`<${Rules} rules=${rules} onEdit=${setOpen} onMove=${move} onRemove=${(i) => change(rules.toSpliced(i, 1))} /><p class="told faint">${p.after}</p>
        <div class="actions told"><button type="button" onClick=${() => setOpen(rules.length)}>${p.add}</button></div>`)}<//>
      <${Explain} query=${query} /></div>
    <div class="stack">${edit && html`<form class="card" onSubmit=${save}><div class="field wide-field"><label for="policy">${p.json(edit.base)}</label><textarea id="policy" class="mono" rows="16" spellcheck=${false} value=${edit.text} onInput=${(e) => setEdit({ ...edit, text: e.target.value })}></textarea></div>
      ${edit.text !== edit.saved && html`<p class="warn" role="status">${p.unsaved}</p>`}${message && html`<p role="status">${line(message, 400)}</p>`}<${Problem} error=${error} /><div class="actions"><button class="primary">${s.save}</button><button type="button" onClick=${load}>${p.discard}</button></div></form>`}
    <${Panel} title=${p.versions}><${Loaded} from=${versions}>${({ items }) => html`<ol class="log">${items.map((v) => html`<li key=${v.version}><span>${clock(v.changed)}</span><span><${Link} href=${to(["access", "policy"], { version: String(v.version) })}>${p.version(v.version)}<//> ${line(v.by ?? "", 60)}</span></li>`)}</ol>`}<//>
      ${old && policy.data && html`<${PolicyDifference} version=${old} current=${policy.data} />`}<//></div></div>
    ${open !== null && html`<${RuleForm} rule=${rules[open]} onClose=${() => setOpen(null)} onSave=${(rule) => change(rules.toSpliced(open, 1, rule))} />`}
    <${Command} cli=${["policy", "show", "--json"]} url="/v1/policy" />`;
}

// Rules are in the order in which they are tried. A condition that is left out always holds.
function Rules({ rules, onEdit, onMove, onRemove }) {
  if (!rules.length) return html`<p class="blank">${p.none}</p>`;
  const list = (names) => (Array.isArray(names) ? names.join(", ") : "");
  const button = (text, name, act, disabled) => html`<button type="button" aria-label=${`${name}: ${text[1]}`} title=${text[1]} disabled=${disabled} onClick=${act}>${text[0]}</button>`;
  return html`<${Grid} id=${(x) => x.i} items=${rules.map((r, i) => ({ ...r, i, label: line(r.name ?? "", 64) }))} columns=${[
    { name: p.columns.rule, text: (r) => r.i, cell: (r) => html`<span class="num faint">${r.i + 1}.</span> <bdi>${r.label}</bdi>`, keep: true },
    { name: p.columns.fits, text: (r) => p.fits(list(r.tools), limits(r.devices), list(r.keys), list(r.via)), kind: "names", bare: true },
    { name: p.columns.action, text: (r) => r.action, cell: (r) => html`<${Outcome} tone=${TONES[r.action] || "neutral"}>${line(word("action", r.action), 40)}<//>`, keep: true, bare: true },
    { name: p.columns.change, text: () => "", keep: true, bare: true, cell: ({ i, label }) => html`<span class="buttons">${button(p.up, label, () => onMove(i, -1), i === 0)}${button(p.down, label, () => onMove(i, 1), i === rules.length - 1)}${button(p.edit, label, () => onEdit(i))}${button(p.remove, label, () => onRemove(i))}</span>` }]} />`;
}

// RuleForm writes one rule. What is left empty is left out.
function RuleForm({ rule = {}, onClose, onSave }) {
  const lines = (names) => (names || []).join("\n"), f = p.form;
  const submit = (event) => {
    event.preventDefault();
    const form = new FormData(event.target), read = (name) => form.get(name).split("\n").map((x) => x.trim()).filter(Boolean), devices = form.get("devices").trim();
    const written = { name: form.get("name").trim(), tools: read("tools"), devices: devices === limits(rule.devices) ? rule.devices : devices, keys: read("keys"), via: form.getAll("via"), action: form.get("action") };
    onSave(Object.fromEntries(Object.entries(written).filter(([, value]) => value && value.length !== 0)));
  };
  const field = (name, control) => html`<div class="field"><label for=${`rule-${name}`}>${f[name]}</label>${control}</div>`;
  return html`<${Dialog} title=${rule.name ? p.edit[1] : p.add} onClose=${onClose}><form onSubmit=${submit}>
    ${field("name", html`<input id="rule-name" name="name" required autofocus autocomplete="off" defaultValue=${rule.name} />`)}
    ${field("action", html`<select id="rule-action" name="action">${ACTIONS.map((x) => html`<option key=${x} value=${x} selected=${x === (rule.action || "confirm")}>${capital(word("action", x))}</option>`)}</select>`)}
    ${field("tools", html`<textarea id="rule-tools" name="tools" rows="2" spellcheck=${false} placeholder="self.camera.*" defaultValue=${lines(rule.tools)}></textarea>`)}
    ${field("devices", html`<input id="rule-devices" name="devices" spellcheck=${false} autocapitalize="off" placeholder="room=lab" defaultValue=${limits(rule.devices)} />`)}
    ${field("keys", html`<textarea id="rule-keys" name="keys" rows="2" spellcheck=${false} defaultValue=${lines(rule.keys)}></textarea>`)}
    <fieldset><legend>${f.via}</legend><div class="chips">${RULE_WAYS.map((x) => html`<label class="check" key=${x}><input type="checkbox" name="via" value=${x} defaultChecked=${rule.via?.includes(x)} /> ${x}</label>`)}</div></fieldset>
    <div class="actions"><button class="primary">${f.done}</button><button type="button" onClick=${onClose}>${s.cancel}</button></div></form><//>`;
}

function PolicyDifference({ version, current }) {
  const past = useData((signal) => get(path("v1", "policy", "versions", version), signal), [version]);
  return html`<${Loaded} from=${past}>${(past_) => html`<div class="told"><h3>${p.compare}</h3><pre class="lines" data-test="lines">${differences(document_(past_).split("\n"), document_(current).split("\n")).map(([sign, text], i) => html`<span key=${i} class=${{ "+": "good", "-": "bad" }[sign] || ""}>${sign} ${line(text, 300)}${"\n"}</span>`)}</pre></div>`}<//>`;
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

// Explain asks which of the rules in force decides about a call. Nothing is called.
function Explain({ query }) {
  const asked = Object.fromEntries(["key", "device", "tool", "via"].map((name) => [name, query.get(name) || ""]));
  const ready = asked.key && asked.tool && asked.device;
  const found = useData((signal) => (ready ? get("/v1/policy/explain" + encode(asked), signal) : Promise.resolve(null)), [JSON.stringify(asked)]);
  const submit = (event) => {
    event.preventDefault();
    setQuery(Object.fromEntries([...new FormData(event.target)].map(([name, value]) => [name, value.trim()])));
  };
  const step = (x) => word("verdict", x.verdict) + (x.action && x.verdict === "decided" ? `: ${word("action", x.action)}` : "");
  return html`<${Panel} title=${p.test} data-test="decision"><form class="row told" onSubmit=${submit}>${["key", "device", "tool"].map((name) => html`<label key=${name}>${p[name]}<input name=${name} defaultValue=${asked[name] || (name === "key" ? "admin" : "")} required spellcheck=${false} autocapitalize="off" /></label>`)}
      <label>${p.via}<select name="via">${WAYS.map((w) => html`<option key=${w} selected=${w === asked.via}>${w}</option>`)}</select></label><button class="primary">${p.decide}</button></form>
    <${Problem} error=${found.error} />${found.data && html`<p class="told"><${Outcome} tone=${TONES[found.data.action] || "neutral"}><b>${line(word("action", found.data.action), 40)}</b><//> <code>${line(found.data.rule ?? "", 100)}</code> ${line(found.data.detail ?? "", 300)}</p>
      <${Grid} id=${(x) => x.rule} items=${found.data.steps || []} columns=${[{ name: p.steps.rule, text: (x) => x.rule, keep: true }, { name: p.steps.verdict, text: step, bare: true }, { name: p.steps.why, text: (x) => x.why, bare: true }]} />`}
    <p class="told faint">${p.testLead}</p>${ready && html`<${Command} cli=${["policy", "explain", asked.key, asked.device, asked.tool, ...flag("--via", asked.via)]} url=${"/v1/policy/explain" + encode(asked)} />`}<//>`;
}
