// One device: what it is, how it is, and what can be done with it.
import { html, useRef, useState } from "../html.js";
import { get, path, query as encode, request } from "../api.js";
import { useData, useEvents, useTick } from "../data.js";
import { bytes, capital, clock, count } from "../format.js";
import { Picture } from "../picture.js";
import { Link, to } from "../route.js";
import { s, word } from "../strings.js";
import { Command, Denied, Facts, JobLinks, Labels, Loaded, Page, Panel, Problem, readLabels, standing, State, Time } from "../ui.js";
import { line, Said } from "../untrusted.js";
import { Controls } from "./controls.js";
import { Tools } from "./tools.js";
import { Timeline } from "./timeline.js";
import { Trace } from "./trace.js";
import { Catalogs } from "./catalog.js";
import { Queue, DeviceAccess } from "./deviceaccess.js";
import { Explanation } from "./call.js";
import { DeviceFirmware } from "./firmware.js";
import { Clients, isClaimed } from "./waiting.js";

const TABS = [["", "devices:read"], ["tools", "devices:read"], ["timeline", "events:read"], ["trace", "events:read"], ["catalog", "devices:read"], ["queue", "jobs:read"], ["access", "devices:write"]];

export function Device({ id, tab, query, self, can }) {
  const device = useData((signal) => get(path("v1", "devices", id), signal), [id]);
  useTick();
  useEvents((message) => {
    if (message.gap || message.omitted || message.events?.some((e) => e.data.device === id && e.type !== "notifications")) device.soon();
  });
  const [, scope] = TABS.find(([name]) => name === tab) || [];
  const tabs = html`<nav aria-label=${s.device.sections}><ul class="tabs">${TABS.filter(([, scope]) => can(scope)).map(([name]) => html`<li key=${name}>
    <${Link} href=${to(["devices", id, name].filter(Boolean))} aria-current=${name === tab ? "page" : null}>${s.device.tabs[name]}<//></li>`)}</ul></nav>`;
  return html`<${Page} title=${device.data?.name || id} lead=${device.data && html`<${State} state=${device.data.state} />
      <span class="faint">${line(standing(device.data), 100)}</span>${!tab && can("jobs") && html`<span class="right"><${JobLinks} ids=${[id]} /></span>`}`} />
    ${tabs}
    ${device.error?.status === 404 && can("events:read") && html`<${Why} device=${{ id }} reload=${device.reload} can=${can} />`}
    ${scope && !can(scope) ? html`<${Denied} scope=${scope} />` : html`<${Loaded} from=${device}>${(d) => {
      const common = { device: d, reload: device.reload, query, self, can };
      switch (tab) {
        case "tools": return html`<${Tools} ...${common} />`;
        case "timeline": return html`<${Timeline} ...${common} />`;
        case "trace": return html`<${Trace} ...${common} />`;
        case "catalog": return html`<${Catalogs} ...${common} />`;
        case "queue": return html`<${Queue} ...${common} />`;
        case "access": return html`<${DeviceAccess} ...${common} />`;
      }
      return html`<${FactsPage} ...${common} />`;
    }}<//>`}`;
}

function FactsPage({ device: d, reload, query, self, can }) {
  const f = s.device.facts;
  return html`
    ${d.admission === "revoked" && html`<p class="notice warn">${s.deviceAccess.revoked}</p>`}
    ${(d.pending.length > 0 || d.state === "contested") && html`<${Panel} title=${isClaimed(d) ? s.admissions.clones : s.admissions.waiting}><${Clients} device=${d} can=${can} done=${reload} /><//>`}
    ${can("events:read") && html`<${Why} device=${d} quiet=${d.state === "online"} reload=${reload} can=${can} />`}
    <div class="cols"><div class="stack"><${Controls} device=${d} self=${self} can=${can} />
    ${can("events:read") && html`<${Timeline} device=${d} query=${query} can=${can} few />`}
    ${can("photos:read") && html`<${Photos} id=${d.id} />`}</div>
    <div class="stack"><${Panel} title=${f.title}><${Facts} items=${[
      [f.id, html`<code>${d.id}</code>`], [f.name, d.name && html`<${Said} text=${d.name} />`],
      [f.board, d.board && html`<${Said} text=${d.board} />`], [f.firmware, d.firmware && html`<${Said} text=${d.firmware} />`],
      [f.connected, d.connected_at && html`${[d.transport && word("transport", d.transport), f.to(line(d.node, 40))].filter(Boolean).join(" ")}, <${Time} at=${d.connected_at} exact />`],
      [f.seen, d.state !== "online" && d.last_seen && html`<${Time} at=${d.last_seen} />`], [f.first, d.first_seen && html`<${Time} at=${d.first_seen} exact />`],
      [f.reason, d.offline_reason && line(capital(word("reason", d.offline_reason)), 100)], [f.since, d.offline_since && html`<${Time} at=${d.offline_since} exact />`],
      [f.mcp, d.mcp.state === "ready" ? count(d.mcp.tools) : `${capital(word("mcp", d.mcp.state))}${d.mcp.tools ? `, ${s.devices.tools(d.mcp.tools)}` : ""}`], [s.device.explain, d.mcp.error && html`<${Said} text=${d.mcp.error} max=${300} />`],
      [f.audio, d.audio.open && s.device.audio(d.audio.packets, d.audio.dropped)],
      [f.labels, Object.keys(d.labels).length > 0 && html`<${Labels} labels=${d.labels} />`],
      [f.client, d.client && html`<code>${line(d.client)}</code>`], [f.session, d.session_id && html`<code>${line(d.session_id)}</code>`],
      [f.catalog, d.mcp.catalog && html`<${Link} href=${to(["devices", d.id, "catalog"])}><code>${d.mcp.catalog.slice(0, 12)}</code><//>`],
    ]} /><//>
    ${can("firmware:read") && html`<${DeviceFirmware} device=${d} can=${can} />`}
    ${can("jobs:read") && html`<${Queue} device=${d} can=${can} />`}
    ${can("devices:write") && html`<${Edit} device=${d} reload=${reload} />`}</div></div>
    <${Command} cli=${["devices", "show", d.id]} url=${path("v1", "devices", d.id)} />`;
}

// Why explains a device. To approve it names the client, where one waits.
function Why({ device: d, quiet, reload, can }) {
  const approve = async () => { await request("POST", path("v1", "devices", d.id, "approve"), { body: d.pending?.length === 1 ? { client: d.pending[0].client } : undefined }); reload(); };
  return html`<${Explanation} url=${path("v1", "devices", d.id, "explain")} watch=${`${d.state}/${d.mcp?.state}`} title=${s.device.explain} quiet=${quiet} about=${{ device: d.id }} can=${can} approve=${approve} />`;
}

function Photos({ id }) {
  const photos = useData((signal) => get("/v1/photos" + encode({ device: id, limit: 6 }), signal), [id]);
  useEvents((message) => message.events?.some((e) => e.type === "photo" && e.data.device === id) && photos.soon());
  return html`<${Panel} title=${s.device.photos}><${Loaded} from=${photos}>${({ items }) => (items.length
    ? html`<ul class="gallery">${items.map((p) => html`<li key=${p.id}><${Picture} id=${p.id} alt=${s.device.photo(line(p.question))} /><small>${clock(p.taken_at)}, ${bytes(p.bytes)}</small> <${Said} text=${p.question} /></li>`)}</ul>`
    : html`<p class="told">${s.device.noPhotos}</p>`)}<//><//>`;
}

// Edit changes what people say of a device. It sends only what changed, and refuses to overwrite other edits.
function Edit({ device, reload }) {
  const [message, setMessage] = useState("");
  const [error, setError] = useState(null);
  const opened = useRef(device); // the edit is of what was shown first
  const text = Object.entries(device.labels).map(([k, v]) => `${k}=${v}`).join("\n");
  const submit = async (event) => {
    event.preventDefault();
    const form = new FormData(event.target);
    setError(null);
    setMessage("");
    try {
      const body = { name: form.get("name").trim(), labels: readLabels(form.get("labels"), Object.keys(opened.current.labels)) };
      if (form.get("transport")) body.transport_wanted = form.get("transport");
      opened.current = await request("PATCH", path("v1", "devices", device.id), { body, headers: { "If-Match": `"${opened.current.revision}"` } });
      setMessage(s.device.saved);
      reload();
    } catch (problem) {
      setError(problem);
      if (problem.status === 409 || problem.status === 412) setMessage(s.device.conflict);
    }
  };
  return html`<details class="card"><summary><h2>${s.device.edit}</h2></summary><form onSubmit=${submit} onFocusIn=${() => { if (!message) opened.current = device; }}>
    <div class="field"><label for="edit-name">${s.device.facts.name}</label><input id="edit-name" name="name" defaultValue=${device.name} autocomplete="off" /></div>
    <div class="field"><label for="edit-labels">${s.device.labelsHint}</label><textarea id="edit-labels" name="labels" rows="3" spellcheck=${false} defaultValue=${text}></textarea></div>
    <div class="field"><label for="edit-transport">${s.device.transportNext}</label><select id="edit-transport" name="transport"><option value="">${s.device.asIs}</option><option>mqtt</option><option>websocket</option></select></div>
    ${message && html`<p role="status">${line(message, 200)}</p>`}<${Problem} error=${error} />
    <div class="actions"><button class="primary">${s.save}</button></div></form></details>`;
}
