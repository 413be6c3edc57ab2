// Jobs: one action on many devices, at a pace. The list, one job live, and a new one with what it would do.
import { html } from "../html.js";
import { download, get, path, query as encode, request } from "../api.js";
import { useData, useEvents, useTick } from "../data.js";
import { age, clock, count, milliseconds, plural } from "../format.js";
import { Link, setQuery, to } from "../route.js";
import { s, word } from "../strings.js";
import { Act, Ask, Command, Empty, Facts, Loaded, Outcome, Page, Pager, Rows, Time } from "../ui.js";
import { line, Quoted } from "../untrusted.js";

const LIVE = 2000; // how often a job that goes on is read
const OUTCOMES = ["ok", "already", "failed", "unknown", "refused", "expired", "cancelled", "superseded", "gone"];
const TONES = new Map([["ok", "good"], ["already", "good"], ["failed", "bad"], ["refused", "bad"]]);
const STATES = ["scheduled", "preparing", "running", "paused", "halted", "done", "cancelled"];
const OPEN = new Set(STATES.slice(0, 5));

const ended = (counts) => OUTCOMES.reduce((n, name) => n + (counts[name] || 0), 0);

// what says what a job does, in a line.
export function what(action) {
  if (action.call) return `${action.call.tool} ${action.call.arguments ? JSON.stringify(action.call.arguments) : ""}`;
  if (action.message) return `${s.jobs.actions.message}: ${action.message.message ?? action.message.type ?? ""}`;
  return `${s.jobs.actions.restart}${action.restart?.when ? ` (${action.restart.when})` : ""}`;
}

const selected = (spec) => spec.select || (spec.devices?.length ? plural(spec.devices.length, "device") : s.jobs.allDevices);

const JobState = ({ job }) => html`<${Outcome} tone=${{ done: "good", halted: "bad" }[job.state] || "neutral"}>${word("job", job.state)}<//>${job.reason && html` <small>${line(word("jobReason", job.reason, job), 160)}</small>`}`;

export const TaskState = ({ task }) => html`<${Outcome} tone=${TONES.get(task.outcome) || "neutral"}>${word("outcome", task.outcome || task.state)}<//>`;

const Progress = ({ counts }) => html`<progress max=${counts.total || 1} value=${ended(counts)} aria-label=${s.jobs.progress(ended(counts), counts.total)}></progress><small>${s.jobs.progress(ended(counts), counts.total)}${counts.failed ? `, ${count(counts.failed)} ${word("outcome", "failed")}` : ""}</small>`;

export function Jobs({ query, can }) {
  const state = query.get("state") || "", cursor = query.get("cursor") || "";
  const list = useData((signal) => get("/v1/jobs" + encode({ state, cursor, limit: 100 }), signal), [state, cursor], { every: 5000 });
  return html`<${Page} title=${s.jobs.title} lead=${can("jobs") && html`<${Link} class="button" href=${to(["jobs", "new"])}>${s.jobs.new}<//>`} />
    ${list.data?.items.some((j) => j.state === "halted" && j.reason === "restored") && html`<p class="notice warn">${s.jobs.restored}</p>`}
    <div class="chips" role="group" aria-label=${s.devices.columns.state}>${STATES.map((name) => html`<button type="button" class="chip" key=${name} aria-pressed=${name === state} onClick=${() => setQuery({ state: name === state ? "" : name })}>${word("job", name)}</button>`)}</div>
    <${Loaded} from=${list}>${({ items }) => (items.length ? html`<${Rows} columns=${s.jobs.columns}>${items.map((job) => html`<tr key=${job.id}>
      <td class="first"><${Link} href=${to(["jobs", job.id])}>${job.spec.note ? html`<bdi>${line(job.spec.note, 60)}</bdi>` : job.id}<//></td><td><${JobState} job=${job} /></td><td><bdi>${line(what(job.spec.action), 100)}</bdi></td><td><bdi>${line(selected(job.spec), 60)}</bdi></td>
      <td><${Progress} counts=${job.counts} /></td><td><${Time} at=${job.created_at} /> <small>${line(job.created_by, 40)}</small></td></tr>`)}<//>` : html`<${Empty}>${s.jobs.empty}<//>`)}<//>
    <${Pager} next=${list.data?.next_cursor} cursor=${cursor} onCursor=${(c) => setQuery({ cursor: c })} />
    <${Command} cli=${["jobs"]} url=${"/v1/jobs" + encode({ state })} />`;
}

export function Job({ id, query, can }) {
  useTick(5000);
  const outcome = query.get("outcome") || "", cursor = query.get("cursor") || "";
  const job = useData((signal) => get(path("v1", "jobs", id), signal), [id], { every: LIVE });
  const live = job.data && OPEN.has(job.data.state);
  const tasks = useData((signal) => get(path("v1", "jobs", id, "tasks") + encode({ outcome, cursor, limit: 100 }), signal), [id, outcome, cursor, job.data?.state], { every: live ? LIVE : 0 });
  const ids = tasks.data?.items.map((t) => t.device).join();
  const named = useData((signal) => (ids ? get("/v1/devices" + encode({ select: `device in (${ids})`, limit: 100 }), signal) : Promise.resolve(null)), [ids]);
  const names = new Map(named.data?.items.map((d) => [d.id, d.name]));
  useEvents((message) => message.events?.some((e) => e.data.job === id) && job.soon());
  const verb = (name, body = {}) => async () => { await request("POST", path("v1", "jobs", id, name), { body, what: `${name} ${id}` }); job.reload(); tasks.reload(); };
  return html`<${Page} title=${job.data?.spec.note || id} lead=${job.data && html`<${JobState} job=${job.data} />`} />
    <${Loaded} from=${job}>${(j) => html`
      <section class="card"><${Progress} counts=${j.counts} />
        <div class="chips" role="group" aria-label=${s.jobs.outcome}>${["waiting", "running", ...OUTCOMES].filter((name) => j.counts[name]).map((name) => html`<button type="button" class="chip" key=${name} aria-pressed=${name === outcome} disabled=${!OUTCOMES.includes(name)} onClick=${() => setQuery({ outcome: name === outcome ? "" : name })}>${word("outcome", name)} <b>${count(j.counts[name])}</b></button>`)}</div>
        ${can("jobs") && html`<div class="actions">
          ${["running", "preparing", "scheduled"].includes(j.state) && html`<${Act} key="pause" label=${s.jobs.pause} act=${verb("pause")} />`}
          ${["paused", "halted"].includes(j.state) && html`<${Act} key="resume" label=${s.jobs.resume} primary act=${verb("resume")} />`}
          ${j.state === "running" && j.spec.stages?.length > 0 && html`<${Act} key="advance" label=${s.jobs.advance} act=${verb("advance")} />`}
          ${!OPEN.has(j.state) && j.counts.failed > 0 && html`<${Act} key="retry" label=${s.jobs.retryFailed} act=${verb("retry", { outcome: ["failed"] })} />`}
          ${OPEN.has(j.state) && html`<${Ask} key="cancel" label=${s.jobs.cancel} question=${s.jobs.cancelAsk} danger act=${verb("cancel")} />`}
          <button type="button" onClick=${() => download(path("v1", "jobs", id, "report") + encode({ format: "csv" }), `job-${id}.csv`)}>${s.jobs.report}</button></div>`}
        <${Facts} items=${[[s.jobs.action, html`<bdi>${line(what(j.spec.action), 200)}</bdi>`], [s.jobs.which, html`<bdi>${line(selected(j.spec), 200)}</bdi>`], [s.jobs.by, line(j.created_by, 60)], [s.jobs.begun, j.begun_at && html`<${Time} at=${j.begun_at} exact />`],
          [s.jobs.ended, j.ended_at && html`<${Time} at=${j.ended_at} exact />`], [s.jobs.until, j.until && html`<${Time} at=${j.until} exact />`], [s.jobs.next, j.next_at && html`<${Time} at=${j.next_at} exact />`],
          [s.jobs.stage, j.spec.stages?.length > 0 && `${j.stage} / ${j.spec.stages.length}`], [s.jobs.round, j.round > 1 && String(j.round)], [s.jobs.missed, j.missed > 0 && count(j.missed)]]} />
        <details><summary>${s.jobs.spec}</summary><${Quoted} pre from=${line(j.created_by, 60)} text=${JSON.stringify(j.spec, null, 2)} /></details></section>`}<//>
    <section><h2>${s.jobs.tasks}</h2><${Loaded} from=${tasks}>${({ items }) => (items.length ? html`<${Rows} columns=${s.jobs.taskColumns}>${items.map((t) => html`<tr key=${t.device + t.round}>
      <td class="first"><${Link} href=${to(["devices", t.device])}><bdi>${line(names.get(t.device) || t.device, 64)}</bdi><//></td><td><${TaskState} task=${t} />${t.attempt > 1 && ` ×${t.attempt}`}</td><td>${t.reason && word("taskReason", t.reason)}</td>
      <td><bdi>${line(t.detail || t.result || "", 160)}</bdi>${t.call && html` <${Link} href=${to(["calls", t.call])}>${t.outcome === "ok" ? t.call : s.why}<//>`}</td><td>${t.duration_ms ? milliseconds(t.duration_ms) : ""}</td><td>${t.ended_at && html`<time datetime=${t.ended_at} title=${clock(t.ended_at)}>${age(t.ended_at)}</time>`}</td></tr>`)}<//>` : html`<${Empty}>${s.jobs.noTasks}<//>`)}<//>
    <${Pager} next=${tasks.data?.next_cursor} cursor=${cursor} onCursor=${(c) => setQuery({ cursor: c })} /></section>
    <${Command} cli=${["jobs", id, "--watch"]} url=${path("v1", "jobs", id)} />`;
}
