// Jobs: one action on many devices, at a pace. The list, one job live, and a new one with what it would do.
import { html } from "../html.js";
import { download, get, path, query as encode, request } from "../api.js";
import { useData, useEvents, useNames, useTick } from "../data.js";
import { age, clock, count, milliseconds, plural } from "../format.js";
import { Link, setQuery, to } from "../route.js";
import { s, word } from "../strings.js";
import { Act, Ask, Command, Empty, Facts, Grid, Loaded, Outcome, Page, Pager, Panel, Time } from "../ui.js";
import { line, Quoted } from "../untrusted.js";

const LIVE = 2000; // how often a job that goes on is read
const OUTCOMES = ["ok", "already", "failed", "unknown", "refused", "expired", "cancelled", "superseded", "gone"];
const TONES = new Map([["ok", "good"], ["already", "good"], ["failed", "bad"], ["refused", "bad"]]);
const STATES = ["scheduled", "preparing", "running", "paused", "halted", "done", "cancelled"];
const OPEN = new Set(STATES.slice(0, 5));

const ended = (counts) => OUTCOMES.reduce((n, name) => n + (counts[name] || 0), 0);

// what says what a job does, in a line.
export function what({ call, message, restart }) {
  if (call) return s.deed(call.tool, call.arguments);
  return message ? `${s.jobs.actions.message}: ${message.message ?? message.type ?? ""}` : `${s.jobs.actions.restart}${restart?.when ? ` ${s.jobs[restart.when]}` : ""}`;
}

// named is the heading of a job: what people noted, else what it does.
export const named = (job) => line(job.spec.note || what(job.spec.action), 1000);

const selected = (spec) => spec.select || (spec.devices?.length ? plural(spec.devices.length, "device") : s.jobs.allDevices);

const JobState = ({ job }) => html`<${Outcome} tone=${{ done: "good", halted: "bad" }[job.state] || "neutral"}>${word("job", job.state)}<//>${job.reason && html` <small>${line(word("jobReason", job.reason, job), 300)}</small>`}`;

export const TaskState = ({ task }) => html`<${Outcome} tone=${TONES.get(task.outcome) || "neutral"}>${word("outcome", task.outcome || task.state)}<//>`;

const Progress = ({ counts }) => html`<progress max=${counts.total || 1} value=${ended(counts)} aria-label=${s.jobs.progress(ended(counts), counts.total)}></progress><small>${s.jobs.progress(ended(counts), counts.total)}${counts.failed ? `, ${count(counts.failed)} ${word("outcome", "failed")}` : ""}</small>`;

export function Jobs({ query, can }) {
  const state = query.get("state") || "", cursor = query.get("cursor") || "", c = s.jobs.columns;
  const list = useData((signal) => get("/v1/jobs" + encode({ state, cursor, limit: 100 }), signal), [state, cursor], { every: 5000 });
  const columns = [
    { name: c.job, text: (j) => j.id, cell: (j) => html`<${Link} href=${to(["jobs", j.id])}><bdi>${named(j)}</bdi><//>${j.spec.note && html`<small class="second">${line(what(j.spec.action), 300)}</small>`}`, keep: true },
    { name: c.state, text: (j) => j.state + j.reason, cell: (j) => html`<${JobState} job=${j} />`, bare: true }, { name: c.devices, text: (j) => selected(j.spec) },
    { name: c.progress, text: (j) => j.id, cell: (j) => html`<${Progress} counts=${j.counts} />`, keep: true, bare: true },
    { name: c.created, text: (j) => j.created_at, cell: (j) => html`<${Time} at=${j.created_at} />` }, { name: s.jobs.by, text: (j) => j.created_by }];
  return html`<${Page} title=${s.jobs.title} lead=${can("jobs") && html`<span class="right"><${Link} class="button" href=${to(["jobs", "new"])}>${s.jobs.new}<//></span>`} />
    ${list.data?.items.some((j) => j.state === "halted" && j.reason === "restored") && html`<p class="notice warn">${s.jobs.restored}</p>`}
    <section class="panel"><div class="filters wrap"><div class="chips" role="group" aria-label=${s.devices.columns.state}>${STATES.map((name) => html`<button type="button" class="chip" key=${name} aria-pressed=${name === state} onClick=${() => setQuery({ state: name === state ? "" : name })}>${word("job", name)}</button>`)}</div></div>
    <${Loaded} from=${list}>${({ items }) => (items.length ? html`<${Grid} columns=${columns} items=${items} id=${(j) => j.id} />` : html`<p class="blank">${state ? s.jobs.noneSo : s.jobs.empty}</p>`)}<//></section>
    <${Pager} next=${list.data?.next_cursor} cursor=${cursor} onCursor=${(x) => setQuery({ cursor: x })} />
    <${Command} cli=${["jobs"]} url=${"/v1/jobs" + encode({ state })} />`;
}

// Needs says who has to do what so that a job goes on, with the buttons for it.
function Needs({ job, can, verb }) {
  const held = job.state === "running" && job.reason === "hold", n = s.jobs.needs;
  if (!held && !["halted", "paused"].includes(job.state)) return null;
  const may = can("jobs"), left = job.counts.waiting;
  return html`<section class=${job.state === "paused" ? "card" : "card why"} data-test="needs"><p><b>${held ? n.hold(job.stage, job.spec.stages.length) : n[job.state](line(word("jobReason", job.reason, job), 300))}</b></p>
    <p>${may ? n.you : n.others} ${held ? n.advance(job.stage + 1, left) : n.resume(left)} ${s.jobs.guard(job.spec)}</p>
    ${may && html`<div class="actions">${held ? html`<${Act} key="advance" label=${s.jobs.open(job.stage + 1)} primary act=${verb("advance")} />` : html`<${Act} key="resume" label=${s.jobs.resume} primary act=${verb("resume")} />`}</div>`}</section>`;
}

export function Job({ id, query, can }) {
  useTick(5000);
  const outcome = query.get("outcome") || "", cursor = query.get("cursor") || "";
  const job = useData((signal) => get(path("v1", "jobs", id), signal), [id], { every: LIVE });
  const live = job.data && OPEN.has(job.data.state);
  const tasks = useData((signal) => get(path("v1", "jobs", id, "tasks") + encode({ outcome, cursor, limit: 100 }), signal), [id, outcome, cursor, job.data?.state], { every: live ? LIVE : 0 });
  const name = useNames((tasks.data?.items || []).map((t) => t.device));
  useEvents((message) => message.events?.some((e) => e.data.job === id) && job.soon());
  const verb = (action, body = {}) => async () => { await request("POST", path("v1", "jobs", id, action), { body, what: job.data && `${action}: ${named(job.data)}` }); job.reload(); tasks.reload(); };
  const c = s.jobs.taskColumns, columns = [
    { name: c.device, text: (t) => t.device, cell: (t) => html`<${Link} href=${to(["devices", t.device])}><bdi>${line(name(t.device), 64)}</bdi><//>`, keep: true },
    { name: c.state, text: (t) => `${t.outcome || t.state} ${t.attempt}`, cell: (t) => html`<${TaskState} task=${t} />${t.attempt > 1 && ` ${s.times(t.attempt)}`}`, bare: true },
    { name: c.why, text: (t) => t.reason && word("taskReason", t.reason) },
    { name: c.result, text: (t) => (t.detail || t.result || "") + (t.outcome === "ok" ? "" : t.call), cell: (t) => html`<bdi>${line(t.detail || t.result || "", 4096)}</bdi>${t.call && html` <${Link} href=${to(["calls", t.call])} aria-label=${`${t.outcome === "ok" ? s.controls.call : s.why} ${line(name(t.device), 64)}`}>${t.outcome === "ok" ? s.controls.call : s.why}<//>`}` },
    { name: c.took, text: (t) => (t.duration_ms ? milliseconds(t.duration_ms) : ""), kind: "right" }, { name: c.ended, text: (t) => t.ended_at && age(t.ended_at), cell: (t) => t.ended_at && html`<time datetime=${t.ended_at} title=${clock(t.ended_at)}>${age(t.ended_at)}</time>` }];
  return html`<${Page} title=${job.data ? named(job.data) : id} lead=${job.data && html`<${JobState} job=${job.data} />`} />
    <${Loaded} from=${job}>${(j) => html`<${Needs} job=${j} can=${can} verb=${verb} />
      <section class="card"><${Progress} counts=${j.counts} />
        <div class="chips" role="group" aria-label=${s.jobs.outcome}>${["waiting", "running", ...OUTCOMES].filter((x) => j.counts[x]).map((x) => html`<button type="button" class="chip" key=${x} aria-pressed=${x === outcome} disabled=${!OUTCOMES.includes(x)} onClick=${() => setQuery({ outcome: x === outcome ? "" : x })}>${word("outcome", x)} <b>${count(j.counts[x])}</b></button>`)}</div>
        ${can("jobs") && html`<div class="actions">
          ${["running", "preparing", "scheduled"].includes(j.state) && html`<${Act} key="pause" label=${s.jobs.pause} act=${verb("pause")} />`}
          ${j.state === "running" && j.reason !== "hold" && j.spec.stages?.length > j.stage && html`<${Ask} key="advance" label=${s.jobs.advance} question=${`${s.jobs.needs.advance(j.stage + 1, j.counts.waiting)} ${s.jobs.guard(j.spec)}`} act=${verb("advance")} />`}
          ${!OPEN.has(j.state) && j.counts.failed > 0 && html`<${Ask} key="retry" label=${s.jobs.retryFailed} question=${`${s.jobs.retryAsk(j.counts.failed)} ${s.jobs.guard(j.spec)}`} act=${verb("retry", { outcome: ["failed"] })} />`}
          ${OPEN.has(j.state) && html`<${Ask} key="cancel" label=${s.jobs.cancel} question=${s.jobs.cancelAsk} danger act=${verb("cancel")} />`}
          <button type="button" onClick=${() => download(path("v1", "jobs", id, "report") + encode({ format: "csv" }), `job-${id}.csv`)}>${s.jobs.report}</button></div>`}
        <${Facts} items=${[[s.jobs.action, html`<bdi>${line(what(j.spec.action), 1000)}</bdi>`], [s.jobs.tool, j.spec.action.call && html`<code>${line(j.spec.action.call.tool)}</code>`], [s.jobs.which, html`<bdi>${line(selected(j.spec), 1000)}</bdi>`], [s.jobs.limits, s.jobs.guard(j.spec)], [s.jobs.by, line(j.created_by, 60)], [s.jobs.begun, j.begun_at && html`<${Time} at=${j.begun_at} exact />`],
          [s.jobs.ended, j.ended_at && html`<${Time} at=${j.ended_at} exact />`], [s.jobs.until, j.until && html`<${Time} at=${j.until} exact />`], [s.jobs.next, j.next_at && html`<${Time} at=${j.next_at} exact />`],
          [s.jobs.stage, j.spec.stages?.length > 0 && `${j.stage} / ${j.spec.stages.length}`], [s.jobs.round, j.round > 1 && String(j.round)], [s.jobs.missed, j.missed > 0 && count(j.missed)], [s.device.facts.id, html`<code>${j.id}</code>`]]} />
        <details><summary>${s.jobs.spec}</summary><${Quoted} pre from=${line(j.created_by, 60)} text=${JSON.stringify(j.spec, null, 2)} /></details></section>`}<//>
    <${Panel} title=${s.jobs.tasks}><${Loaded} from=${tasks}>${({ items }) => (items.length ? html`<${Grid} columns=${columns} items=${items} id=${(t) => t.device + t.round} />` : html`<${Empty}>${s.jobs.noTasks}<//>`)}<//><//>
    <${Pager} next=${tasks.data?.next_cursor} cursor=${cursor} onCursor=${(x) => setQuery({ cursor: x })} />
    <${Command} cli=${["jobs", id, "--watch"]} url=${path("v1", "jobs", id)} />`;
}
