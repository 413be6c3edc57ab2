// Is the cluster well, and is it set up right?
import { html } from "../html.js";
import { ApiError, get, query as encode, send } from "../api.js";
import { useData } from "../data.js";
import { count } from "../format.js";
import { Link, setQuery, to } from "../route.js";
import { s, word } from "../strings.js";
import { Command, Copyable, flag, Loaded, Page, Rows, Time } from "../ui.js";
import { line } from "../untrusted.js";

// readiness answers for the node that was asked; 503 is an answer here.
export async function readiness(signal) {
  try {
    return await (await send("GET", "/readyz", { signal })).json();
  } catch (error) {
    if (error instanceof ApiError && error.status === 503) return error.problem;
    throw error;
  }
}

export function Nodes() {
  const nodes = useData((signal) => get("/v1/nodes", signal), [], { every: 5000 });
  const ready = useData(readiness, [], { every: 5000 });
  return html`<${Page} title=${s.nodes.title} />
    <${Loaded} from=${ready}>${(r) => html`<p class=${r.ready ? "notice" : "notice warn"}>${r.ready ? s.nodes.ready : html`${s.nodes.down} ${Object.entries(r.down || {}).map(([part, why]) => line(`${part}: ${why}`, 200)).join("; ")}`}</p>`}<//>
    <${Loaded} from=${nodes}>${({ items }) => html`<${Rows} columns=${s.nodes.columns}>${items.map((n) => html`<tr key=${n.name}>
      <td class="first"><${Link} href=${to(["stats"], { node: n.name })}><bdi>${line(n.name, 60)}</bdi><//></td><td>${line(n.version, 40)}</td><td><${Link} href=${to(["devices"], { node: n.name })}>${count(n.devices)}<//></td><td><${Time} at=${n.started} /></td><td><code>${line(n.api, 80)}</code></td></tr>`)}<//>`}<//>
    <${Command} cli=${["nodes"]} url="/v1/nodes" />`;
}

const HIDDEN = /password|token|secret|username|key$/i;

// reply writes the reply to a device without what would let others connect as it.
const reply = (value) => JSON.stringify(value, (name, v) => (HIDDEN.test(name) && typeof v === "string" ? s.doctor.secret : v), 2);

export function Doctor({ query }) {
  const device = query.get("device") || "";
  const found = useData((signal) => get("/v1/diagnosis" + encode({ device }), signal), [device]);
  const submit = (event) => {
    event.preventDefault();
    setQuery({ device: new FormData(event.target).get("device").trim() });
  };
  return html`<${Page} title=${s.doctor.title} /><p>${s.doctor.lead}</p>
    <form class="row" onSubmit=${submit}><label>${s.doctor.device}<input name="device" defaultValue=${device} spellcheck=${false} /></label><button>${s.doctor.check}</button></form>
    <${Loaded} from=${found}>${(d) => html`
      <section class="card"><h2>${s.doctor.ota}</h2><${Copyable} text=${d.ota_url} /></section>
      <section class="card"><h2>${s.doctor.findings}</h2>${d.findings.length ? html`<ul class="plain">${d.findings.map((f, i) => html`<li key=${i}><strong class=${f.severity}>${word("severity", f.severity)}</strong> <code>${f.setting}</code><br />${line(f.message, 600)}</li>`)}</ul>` : html`<p>${s.doctor.none}</p>`}</section>
      <section class="card"><h2>${s.doctor.reply} <small>${d.status}</small></h2><pre>${reply(d.reply)}</pre></section>`}<//>
    <${Command} cli=${["doctor", ...flag("--mac", device)]} url=${"/v1/diagnosis" + encode({ device })} />`;
}
