// Jobs: one action on many devices, at a pace. The list, one job live, and a new one with what it would do.
import { html, useState } from "../html.js";
import { download, get, path, query as encode, request } from "../api.js";
import { useData, useEvents, useImages, useNames, useTick } from "../data.js";
import { age, clock, count, milliseconds, plural } from "../format.js";
import { Link, setQuery, to } from "../route.js";
import { codes, s, word } from "../strings.js";
import { Act, Ask, Command, Empty, Facts, flag, Grid, Loaded, Outcome, Page, Pager, Panel, Time } from "../ui.js";
import { line, Quoted } from "../untrusted.js";

const LIVE = 2000; // how often a job that goes on is read
const OUTCOMES = ["ok", "already", "failed", "unknown", "refused", "expired", "cancelled", "superseded", "gone"];
const TONES = new Map([["ok", "good"], ["already", "good"], ["failed", "bad"], ["refused", "bad"]]);
const STATES = ["scheduled", "preparing", "running", "paused", "halted", "done", "cancelled"];
const OPEN = new Set(STATES.slice(0, 5));

export const ended = (counts) => OUTCOMES.reduce((n, name) => n + (counts[name] || 0), 0);

// waits says whether a job waits for a person.
export const waits = (job) => job.state === "halted" || job.reason === "hold";

// what says what a job does, in a line. image finds an image by its id.
export function what({ call, message, restart, firmware }, image) {
  if (firmware) return s.firmware.job(firmware.image, image?.(firmware.image), firmware.rollback_of);
  if (call) return s.deed(call.tool, call.arguments);
  return message ? `${s.jobs.actions.message}: ${message.message ?? message.type ?? ""}` : `${s.jobs.actions.restart}${restart?.when ? ` ${s.jobs[restart.when]}` : ""}`;
}

// named is the heading of a job: its image, or what people noted, else what it does.
export const named = (job, image) => line((!job.spec.action.firmware && job.spec.note) || what(job.spec.action, image), 1000);

const selected = (spec) => spec.select || (spec.devices?.length ? plural(spec.devices.length, "device") : s.jobs.allDevices);

const JobState = ({ job }) => html`<${Outcome} tone=${{ done: "good", halted: "bad" }[job.state] || "neutral"}>${word("job", job.state)}<//>${job.reason && html` <small>${line(word("jobReason", job.reason, job), 300)}</small>`}`;

export const TaskState = ({ task }) => html`<${Outcome} tone=${TONES.get(task.outcome) || "neutral"}>${word("outcome", task.outcome || task.state)}<//>`;

// JobList links to jobs, each with its state.
const JobList = ({ jobs, image }) => html`<ul class="plain">${jobs.map((j) => html`<li key=${j.id}><${Link} href=${to(["jobs", j.id])}><bdi>${named(j, image)}</bdi><//> <small>${word("job", j.state)}</small></li>`)}</ul>`;

const Progress = ({ counts }) => html`<progress max=${counts.total || 1} value=${ended(counts)} aria-label=${s.jobs.progress(ended(counts), counts.total)}></progress><small>${s.jobs.progress(ended(counts), counts.total)}${counts.failed ? `, ${count(counts.failed)} ${word("outcome", "failed")}` : ""}</small>`;

// taskWhy says in words what a task waits for, what its device does, or why it failed.
export function taskWhy(t) {
  if (t.firmware?.phase) return word("phase", t.firmware.phase, t.firmware);
  return [t.reason && word("taskReason", t.reason), t.outcome !== "ok" && Object.hasOwn(codes.taskCode, t.code) && word("taskCode", t.code)].filter(Boolean).join(": ");
}

export function Jobs({ query, can }) {
  const state = query.get("state") || "", group = query.get("group") || "", cursor = query.get("cursor") || "", c = s.jobs.columns;
  const list = useData((signal) => get("/v1/jobs" + encode({ state, group, cursor, limit: 100 }), signal), [state, group, cursor], { every: 5000 });
  const image = useImages(list.data?.items || [], can), second = ({ spec }) => (spec.action.firmware ? spec.note : spec.note && what(spec.action));
  const columns = [
    { name: c.job, text: (j) => j.id, cell: (j) => html`<${Link} href=${to(["jobs", j.id])}><bdi>${named(j, image)}</bdi><//>${second(j) && html`<small class="second">${line(second(j), 300)}</small>`}`, keep: true },
    { name: c.state, text: (j) => j.state + j.reason, cell: (j) => html`<${JobState} job=${j} />`, bare: true }, { name: c.devices, text: (j) => selected(j.spec) },
    { name: c.progress, text: (j) => j.id, cell: (j) => html`<${Progress} counts=${j.counts} />`, keep: true, bare: true },
    { name: c.created, text: (j) => j.created_at, cell: (j) => html`<${Time} at=${j.created_at} />` }, { name: s.jobs.by, text: (j) => j.created_by }];
  return html`<${Page} title=${s.jobs.title} lead=${can("jobs") && html`<span class="right"><${Link} class="button" href=${to(["jobs", "new"])}>${s.jobs.new}<//></span>`} />
    ${group && html`<p>${s.jobs.inGroup} <${Link} href=${to(["jobs"])}>${s.jobs.every}<//></p>`}
    ${list.data?.items.some((j) => j.state === "halted" && j.reason === "restored") && html`<p class="notice warn">${s.jobs.restored}</p>`}
    <section class="panel"><div class="filters wrap"><div class="chips" role="group" aria-label=${s.devices.columns.state}>${STATES.map((name) => html`<button type="button" class="chip" key=${name} aria-pressed=${name === state} onClick=${() => setQuery({ state: name === state ? "" : name })}>${word("job", name)}</button>`)}</div></div>
    <${Loaded} from=${list}>${({ items }) => (items.length ? html`<${Grid} columns=${columns} items=${items} id=${(j) => j.id} />` : html`<p class="blank">${state ? s.jobs.noneSo : s.jobs.empty}</p>`)}<//></section>
    <${Pager} next=${list.data?.next_cursor} cursor=${cursor} onCursor=${(x) => setQuery({ cursor: x })} />
    <${Command} cli=${["jobs", ...flag("--group", group)]} url=${"/v1/jobs" + encode({ state, group })} />`;
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
  const roll = job.data?.spec.action.firmware, group = job.data?.group;
  const running = useData((signal) => (roll && live ? get(path("v1", "jobs", id, "tasks") + encode({ state: "running", limit: 100 }), signal) : null), [id, !!roll, job.data?.state], { every: LIVE });
  const others = useData((signal) => (group ? get("/v1/jobs" + encode({ group, limit: 1000 }), signal) : null), [group]);
  const [made, setMade] = useState(null); // the jobs that take this one back
  const relatives = (others.data?.items || []).filter((j) => j.id !== id), image = useImages([...(job.data ? [job.data] : []), ...relatives, ...(made?.items || [])], can);
  const name = useNames([...(running.data?.items || []), ...(tasks.data?.items || [])].map((t) => t.device));
  useEvents((message) => message.events?.some((e) => e.data.job === id) && job.soon());
  const verb = (action, body = {}) => async () => { await request("POST", path("v1", "jobs", id, action), { body, what: job.data && `${action}: ${named(job.data, image)}` }); job.reload(); tasks.reload(); };
  const takeBack = async () => { setMade(await request("POST", path("v1", "jobs", id, "rollback"))); job.reload(); tasks.reload(); };
  const c = s.jobs.taskColumns, device = { name: c.device, text: (t) => t.device, cell: (t) => html`<${Link} href=${to(["devices", t.device])}><bdi>${line(name(t.device), 64)}</bdi><//>`, keep: true };
  const phases = [device, { name: s.jobs.phase, text: taskWhy, keep: true }, { name: s.jobs.begun, text: (t) => t.begun_at, cell: (t) => html`<${Time} at=${t.begun_at} />` }, { name: s.jobs.flashes, text: (t) => t.firmware?.flashes || "", kind: "right" }];
  const columns = [device,
    { name: c.state, text: (t) => `${t.outcome || t.state} ${t.attempt}`, cell: (t) => html`<${TaskState} task=${t} />${t.attempt > 1 && ` ${s.times(t.attempt)}`}`, bare: true },
    { name: c.why, text: taskWhy },
    { name: c.result, text: (t) => (t.detail || t.result || "") + (t.outcome === "ok" ? "" : t.call), cell: (t) => html`<bdi>${line(t.detail || t.result || "", 4096)}</bdi>${t.call && html` <${Link} href=${to(["calls", t.call])} aria-label=${`${t.outcome === "ok" ? s.controls.call : s.why} ${line(name(t.device), 64)}`}>${t.outcome === "ok" ? s.controls.call : s.why}<//>`}` },
    { name: c.took, text: (t) => (t.duration_ms ? milliseconds(t.duration_ms) : ""), kind: "right" }, { name: c.ended, text: (t) => t.ended_at && age(t.ended_at), cell: (t) => t.ended_at && html`<time datetime=${t.ended_at} title=${clock(t.ended_at)}>${age(t.ended_at)}</time>` }];
  return html`<${Page} title=${job.data ? named(job.data, image) : id} lead=${job.data && html`<${JobState} job=${job.data} />`} />
    <${Loaded} from=${job}>${(j) => html`<${Needs} job=${j} can=${can} verb=${verb} />
      <section class="card"><${Progress} counts=${j.counts} />
        <div class="chips" role="group" aria-label=${s.jobs.outcome}>${["waiting", "running", ...OUTCOMES].filter((x) => j.counts[x]).map((x) => html`<button type="button" class="chip" key=${x} aria-pressed=${x === outcome} disabled=${!OUTCOMES.includes(x)} onClick=${() => setQuery({ outcome: x === outcome ? "" : x })}>${word("outcome", x)} <b>${count(j.counts[x])}</b></button>`)}</div>
        ${can("jobs") && html`<div class="actions">
          ${["running", "preparing", "scheduled"].includes(j.state) && html`<${Act} key="pause" label=${s.jobs.pause} act=${verb("pause")} />`}
          ${j.state === "running" && j.reason !== "hold" && j.spec.stages?.length > j.stage && html`<${Ask} key="advance" label=${s.jobs.advance} question=${`${s.jobs.needs.advance(j.stage + 1, j.counts.waiting)} ${s.jobs.guard(j.spec)}`} act=${verb("advance")} />`}
          ${!OPEN.has(j.state) && j.counts.failed > 0 && html`<${Ask} key="retry" label=${s.jobs.retryFailed} question=${`${s.jobs.retryAsk(j.counts.failed)} ${s.jobs.guard(j.spec)}`} act=${verb("retry", { outcome: ["failed"] })} />`}
          ${OPEN.has(j.state) && html`<${Ask} key="cancel" label=${s.jobs.cancel} question=${s.jobs.cancelAsk} danger act=${verb("cancel")} />`}
          ${roll && !roll.rollback_of && j.begun_at && can("firmware") && html`<${Ask} key="back" label=${s.jobs.takeBack} question=${s.jobs.takeBackAsk(named(j, image))} danger act=${takeBack} />`}
          <button type="button" onClick=${() => download(path("v1", "jobs", id, "report") + encode({ format: "csv" }), `job-${id}.csv`)}>${s.jobs.report}</button></div>`}
        ${made && html`<p class="notice" role="status">${s.jobs.takenBack}: <${JobList} jobs=${made.items} image=${image} /> ${made.unreachable > 0 && s.jobs.unreachable(made.unreachable)}</p>`}
        <${Facts} items=${[[s.jobs.action, html`<bdi>${line(what(j.spec.action, image), 1000)}</bdi>`], [s.jobs.note, roll && line(j.spec.note || "", 1000)], [s.jobs.takesBack, roll?.rollback_of && html`<${Link} href=${to(["jobs", roll.rollback_of])}><code>${line(roll.rollback_of, 60)}</code><//>`],
          [s.jobs.group, relatives.length > 0 && html`<${JobList} jobs=${relatives} image=${image} />`], [s.jobs.tool, j.spec.action.call && html`<code>${line(j.spec.action.call.tool)}</code>`], [s.jobs.which, html`<bdi>${line(selected(j.spec), 1000)}</bdi>`], [s.jobs.limits, s.jobs.guard(j.spec)], [s.jobs.by, line(j.created_by, 60)], [s.jobs.begun, j.begun_at && html`<${Time} at=${j.begun_at} exact />`],
          [s.jobs.ended, j.ended_at && html`<${Time} at=${j.ended_at} exact />`], [s.jobs.until, j.until && html`<${Time} at=${j.until} exact />`], [s.jobs.next, j.next_at && html`<${Time} at=${j.next_at} exact />`],
          [s.jobs.stage, j.spec.stages?.length > 0 && `${j.stage} / ${j.spec.stages.length}`], [s.jobs.round, j.round > 1 && String(j.round)], [s.jobs.missed, j.missed > 0 && count(j.missed)], [s.device.facts.id, html`<code>${j.id}</code>`]]} />
        <details><summary>${s.jobs.spec}</summary><${Quoted} pre from=${line(j.created_by, 60)} text=${JSON.stringify(j.spec, null, 2)} /></details></section>`}<//>
    ${running.data?.items.length > 0 && html`<${Panel} title=${s.jobs.running} data-test="running"><${Grid} columns=${phases} items=${running.data.items} id=${(t) => t.device} /><//>`}
    <${Panel} title=${s.jobs.tasks}><${Loaded} from=${tasks}>${({ items }) => (items.length ? html`<${Grid} columns=${columns} items=${items} id=${(t) => t.device + t.round} />` : html`<${Empty}>${s.jobs.noTasks}<//>`)}<//><//>
    <${Pager} next=${tasks.data?.next_cursor} cursor=${cursor} onCursor=${(x) => setQuery({ cursor: x })} />
    <${Command} cli=${["jobs", id, "--watch"]} url=${path("v1", "jobs", id)} />`;
}
