// Which images are there, who runs what, and who could get an image? Nothing on this page changes a device.
import { html, useState } from "../html.js";
import { get, now, path, query as encode, request } from "../api.js";
import { useData, useEvents } from "../data.js";
import { capital, count, plural, short } from "../format.js";
import { Link, go, setQuery, to } from "../route.js";
import { s, word } from "../strings.js";
import { Ask, Command, Grid, Loaded, Outcome, Page, Pager, Panel, Problem, Time } from "../ui.js";
import { line, Said } from "../untrusted.js";
import { recent } from "./events.js";
import { taskWhy } from "./jobs.js";
import { Shares } from "./overview.js";

const f = s.firmware, c = f.columns;
export const release = (i) => `${i.project}@${i.version}`;
const TONES = { fit: "good", already: "good", waits: "neutral", blocked: "bad" };

// targetOf reads the name of a release, or the id of an image.
export const targetOf = (what) => (what.includes("@") || /^\d+\./.test(what) ? { release: what } : { image: what });

// RollLink leads to the rollout of a release or an image.
const RollLink = ({ can, image, select, small }) => can("firmware") && can("jobs") && html`<${Link} class=${small ? "button small" : "button"} href=${to(["firmware", "roll"], { image, select })}>${f.roll}<//>`;

// Findings are sentences of the node; the code is what a job allows.
const Findings = ({ items }) => items.length > 0 && html`<ul class="plain">${items.map((x) => html`<li key=${x.code}><${Outcome} tone=${x.severity === "error" ? "bad" : "neutral"}><${Said} text=${x.text} max=${400} /><//></li>`)}</ul>`;

export function Firmware({ query, can }) {
  const cursor = query.get("cursor") || "";
  const list = useData((signal) => get("/v1/firmware" + encode({ cursor, limit: 100 }), signal), [cursor]);
  const columns = [...COLUMNS, { name: c.change, text: () => "", cell: (i) => html`<${Buttons} image=${i} can=${can} onChange=${list.reload} />`, keep: true, bare: true }];
  return html`<${Page} title=${s.pages.firmware} /><p>${f.lead}</p>
    <section class="panel" data-test="images"><header><h2>${f.images}</h2></header><${Loaded} from=${list}>${({ items }) => (items.length ? html`<${Grid} columns=${columns} items=${items} id=${(i) => i.id} />` : html`<p class="blank">${f.empty}</p>`)}<//></section>
    <${Pager} next=${list.data?.next_cursor} cursor=${cursor} onCursor=${(next) => setQuery({ cursor: next })} />
    ${can("firmware") && html`<${Upload} onAdded=${list.reload} />`}
    <${Check} query=${query} can=${can} />
    ${can("devices:read") && html`<${Running} />`}
    ${can("events:read") && html`<${Changes} />`}
    <${Command} cli=${["firmware", "list"]} url="/v1/firmware" />`;
}

const COLUMNS = [
  { name: c.release, text: release, cell: (i) => html`<${Said} text=${release(i)} /><code class="second faint">${short(i.id)}</code>`, keep: true, bare: true }, { name: c.boards, text: (i) => i.boards.join(", "), cell: (i) => html`<${Said} text=${i.boards.join(", ")} max=${200} />`, keep: true },
  { name: c.chip, text: (i) => i.chip }, { name: c.devices, kind: "right", text: (i) => i.devices ?? "", cell: (i) => count(i.devices) },
  { name: c.findings, text: (i) => i.findings.map((x) => x.code).join(), cell: (i) => html`<${Findings} items=${i.findings} />`, kind: "names" },
  { name: c.added, text: (i) => i.added_at + (i.added_by || ""), cell: (i) => html`<${Time} at=${i.added_at} /> <small>${line(i.added_by || "", 60)}</small>` }, { name: c.note, text: (i) => i.note || "", kind: "names" }];

function Buttons({ image: i, can, onChange }) {
  const [refused, setRefused] = useState(false); // the answer says how many devices run it, and how many lose their way back
  const remove = async () => {
    try {
      await request("DELETE", path("v1", "firmware", i.id) + encode({ force: refused }));
    } catch (problem) {
      setRefused(problem.status === 409);
      throw problem;
    }
    onChange();
  };
  return html`<div class="buttons"><button type="button" onClick=${() => go(to(["firmware"], { image: short(i.id) }))}>${f.check}</button><${RollLink} can=${can} image=${release(i)} small />
    ${can("firmware") && html`<${Ask} label=${f.remove} danger act=${remove} question=${(refused ? f.removeAnyway : f.removeAsk)(line(release(i), 80))} />`}</div>`;
}

// Upload reads a file on the node first, and keeps its images only then.
function Upload({ onAdded }) {
  const [file, setFile] = useState(null);
  const [read, setRead] = useState(null); // {items, dropped, added}
  const [error, setError] = useState(null);
  const [signature, setSignature] = useState(null); // null: the node has not asked for one
  const [busy, setBusy] = useState(false);
  const send = async (dry) => {
    if (busy) return;
    setBusy(true);
    setError(null);
    try {
      setRead({ ...await request("POST", "/v1/firmware" + encode({ dry_run: dry, signature }), { body: file }), added: !dry });
      if (!dry) onAdded();
    } catch (problem) {
      setRead(null);
      setError(problem);
      if (problem.problem?.findings?.some((x) => x.code === "signature_missing")) setSignature("");
    } finally {
      setBusy(false);
    }
  };
  const choose = (event) => { setFile(event.target.files[0] || null); setRead(null); setError(null); setSignature((now) => now && ""); };
  return html`<section class="panel" data-test="upload"><header><h2>${f.add}</h2></header><div class="told">
    <div class="field"><label for="firmware-file">${f.file}</label><input id="firmware-file" type="file" accept=".bin,.zip" onChange=${choose} /></div>
    ${signature !== null && html`<div class="field"><label for="firmware-signature">${f.signature}</label><input id="firmware-signature" spellcheck=${false} autocomplete="off" value=${signature} onInput=${(event) => setSignature(event.target.value.trim())} /></div>`}
    <div class="actions"><button type="button" disabled=${!file || busy} onClick=${() => send(true)}>${f.inspect}</button>
      ${read && !read.added && html`<button type="button" class="primary" disabled=${busy} onClick=${() => send(false)}>${f.keep}</button>`}</div>
    <${Problem} error=${error}><${Findings} items=${error?.problem?.findings || []} /><//>
    <div role="status">${read && html`<p><${Outcome} tone="good">${read.added ? f.kept : f.fit(read.items.length)}<//></p>
      ${read.items.map((i) => html`<div key=${i.id}><strong><${Said} text=${release(i)} /></strong> · <${Said} text=${i.boards.join(", ")} max=${200} /> · ${line(i.chip, 20)} <${Findings} items=${i.findings} /></div>`)}
      ${read.dropped.length > 0 && html`<p class="faint">${f.dropped} <${Said} text=${read.dropped.join(", ")} max=${400} /></p>`}`}</div></div></section>`;
}

// Check says who could get an image, or the images of a release.
function Check({ query, can }) {
  const what = query.get("image") || "", select = query.get("select") || "", after = query.get("after") || "";
  const submit = (event) => {
    event.preventDefault();
    const form = new FormData(event.target);
    setQuery({ image: form.get("image").trim(), select: form.get("select").trim(), after: "" });
  };
  const found = useData((signal) => (what ? get("/v1/firmware/check" + encode({ ...targetOf(what), select, cursor: after, limit: 50 }), signal) : null), [what, select, after]);
  return html`<section class="panel" data-test="check"><header><h2>${f.checkTitle}</h2></header>
    <form class="told" onSubmit=${submit} key=${what + select}><div class="field"><label for="check-image">${f.target}</label><input id="check-image" name="image" required spellcheck=${false} autocapitalize="off" placeholder="xiaozhi@2.4.2" defaultValue=${what} /></div>
      <div class="field"><label for="check-select">${f.select}</label><input id="check-select" name="select" spellcheck=${false} autocapitalize="off" placeholder="room=lab" defaultValue=${select} /></div>
      <div class="actions"><button class="primary">${f.check}</button>${what && html`<${RollLink} can=${can} image=${what} select=${select} />`}</div></form>
    ${what && html`<${Loaded} from=${found}>${({ counts, items, next_cursor: next }) => html`
      ${counts && html`<div class="told"><p data-test="counts">${plural(counts.devices, "device")}: ${Object.keys(TONES).filter((v) => counts.verdicts[v]).map((verdict) => html`<${Outcome} key=${verdict} tone=${TONES[verdict]}>${count(counts.verdicts[verdict])} ${word("fitness", verdict)}<//> `)}</p>
        ${Object.keys(counts.findings).length > 0 && html`<ul class="plain">${Object.entries(counts.findings).map(([code, n]) => html`<li key=${code}>${count(n)} × <code>${line(code, 40)}</code></li>`)}</ul>`}</div>`}
      ${items.length > 0 ? html`<${Grid} columns=${VERDICTS} items=${items} id=${(v) => v.device} />` : html`<p class="blank">${f.nobody}</p>`}
      <${Pager} next=${next} cursor=${after} onCursor=${(at) => setQuery({ after: at })} />`}<//>`}</section>`;
}

const VERDICTS = [
  { name: c.device, text: (v) => v.device, cell: (v) => html`<${Link} href=${to(["devices", v.device])}>${line(v.device, 40)}<//>`, keep: true, bare: true },
  { name: c.verdict, text: (v) => word("fitness", v.verdict), cell: (v) => html`<${Outcome} tone=${TONES[v.verdict]}>${word("fitness", v.verdict)}<//>`, keep: true }, { name: c.board, text: (v) => v.board }, { name: c.runs, text: (v) => v.firmware },
  { name: c.findings, text: (v) => v.findings.map((x) => x.code).join(), cell: (v) => html`<${Findings} items=${v.findings} />`, kind: "names" }];

// Running is who runs what, by version; each leads to these devices.
function Running() {
  const fleet = useData((signal) => get("/v1/fleet", signal), [], { every: 60_000 });
  return html`<div data-test="running"><${Loaded} from=${fleet}>${({ firmware, total }) => html`<${Shares} title=${f.running} counts=${firmware} total=${total} facet="firmware" more=${to(["devices"])} none=${f.nothing} />`}<//></div>`;
}

const DAY = 86_400_000, MOST = 50;

// Changes are the devices that came with another image in the last day, the newest first.
function Changes() {
  const list = useData(async (signal) => (await recent({ type: "firmware", since: new Date(now() - DAY).toISOString() }, MOST, signal)).map((e) => e.data).reverse(), []);
  useEvents((message) => message.events?.some((e) => e.type === "firmware") && list.soon());
  return html`<section class="panel" data-test="changes"><header><h2>${f.changes}</h2></header><${Loaded} from=${list}>${(events) => (events.length ? html`<${Grid} columns=${CHANGES} items=${events} id=${(e) => e.device + e.time} />` : html`<p class="told">${f.noChanges}</p>`)}<//></section>`;
}

const CHANGES = [
  { name: c.device, text: (e) => e.device, cell: (e) => html`<${Link} href=${to(["devices", e.device, "timeline"])}>${line(e.device, 40)}<//>`, keep: true, bare: true }, { name: c.from, text: (e) => e.from.version, keep: true }, { name: c.to, text: (e) => e.to.version, keep: true },
  { name: c.board, text: (e) => e.board }, { name: c.cause, text: (e) => word("imageCause", e.cause) }, { name: c.at, text: (e) => e.time, cell: (e) => html`<${Time} at=${e.time} />`, keep: true }];

const told = (t) => (t.state === "running" ? taskWhy(t) : t.state === "waiting" ? f.waits(taskWhy(t)) : f.ended(word("outcome", t.outcome), taskWhy(t)));

// DeviceFirmware says why a device gets no firmware, and how far the task has come that gives it some, or how the last one ended. Without
// both it shows nothing.
export function DeviceFirmware({ device, can }) {
  const url = path("v1", "devices", device.id, "firmware");
  const own = useData((signal) => get(url, signal), [device.id, device.firmware, device.state]);
  useEvents((message) => (message.gap || message.events?.some((e) => e.data.device === device.id && ["job.phase", "task"].includes(e.type))) && own.soon());
  const { bar, last } = own.data || {}, lift = async () => { await request("DELETE", `${url}/bar`); own.reload(); };
  return (bar || last) && html`<${Panel} title=${s.pages.firmware} data-test="device-firmware"><div class="told">
    ${bar && html`<p class="plain"><${Outcome} tone="bad">${line(f.bar(bar), 600)}<//></p>${can("firmware") && html`<div class="actions"><${Ask} label=${f.lift} question=${f.liftAsk} act=${lift} /></div>`}`}
    ${last && html`<p><${Link} href=${to(["jobs", last.job])}>${capital(told(last))}<//>${last.ended_at && html` <${Time} at=${last.ended_at} />`}</p>`}</div><//>`;
}
