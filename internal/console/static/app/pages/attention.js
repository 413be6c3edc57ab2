// What is wrong now, worst first: one sentence and one way out each. Only what the key may read is asked.
import { html } from "../html.js";
import { get, path, query as encode } from "../api.js";
import { useData, useImages, useNames } from "../data.js";
import { capital } from "../format.js";
import { Link, to } from "../route.js";
import { s, word } from "../strings.js";
import { Panel } from "../ui.js";
import { line } from "../untrusted.js";
import { ended, named, waits } from "./jobs.js";
import { readiness } from "./nodes.js";

const SOON = 15_000, LATER = 60_000; // how often parts without events are read
const FEW = 3; // devices with one cause that have a line each
const ASKED = 100; // waiting and contested devices whose names are read
const CAUSES = ["boot_loop", "cloned", "upgrade_failed"]; // of devices that are offline

const a = s.attention;

// useAttention returns the lines, worst first, and the names of what could not be asked; lines is null until all has answered once.
export function useAttention({ can, needs, stats }) {
  const counts = needs.fleet.data?.state || {};
  const ask = (scope, load, deps, every) => useData((signal) => (scope === "" || can(scope) ? load(signal) : null), deps, { every });
  const parts = { // by the pages that show more of them
    devices: needs.fleet, jobs: needs.jobs, stats,
    admissions: ask("devices:read", (signal) => (counts.pending || counts.contested ? get("/v1/devices" + encode({ select: "state in (pending,contested)", limit: ASKED }), signal) : { items: [] }), [counts.pending, counts.contested]),
    webhooks: ask("webhooks", (signal) => get("/v1/webhooks", signal), [], SOON),
    nodes: ask("", readiness, [], SOON),
    doctor: ask("admin", (signal) => get("/v1/diagnosis", signal), [], LATER),
    events: ask("events:read", (signal) => (counts.offline ? get("/v1/explain" + encode({ select: "seen<1h", limit: 200 }), signal) : { groups: [] }), [!counts.offline], LATER),
  };
  const unknown = Object.keys(parts).filter((name) => parts[name].error && ![403, 404].includes(parts[name].error.status)).map((name) => s.pages[name]);
  const groups = (parts.events.data?.groups || []).filter((g) => CAUSES.includes(g.cause));
  // Of a rollout that one device has halted, the device says more than the rule.
  const jobs = needs.jobs.data || [], image = useImages(jobs, can), halted = jobs.filter((j) => j.spec.action.firmware && j.state === "halted" && j.reason === "stop" && j.counts.failed + j.counts.unknown < 2);
  const culprits = useData((signal) => Promise.all(halted.slice(0, FEW).map(async (j) => (await get(path("v1", "jobs", j.id, "tasks") + encode({ limit: 1000 }), signal)).items.find((t) => t.code && ["", "failed"].includes(t.outcome)))), [halted.map((j) => j.id).join()]);
  const failed = (culprits.data || []).filter(Boolean);
  const name = useNames([...groups.flatMap((g) => (g.devices.length > FEW ? [] : g.devices)), ...failed.map((t) => t.device)]);
  const loaded = Object.values(parts).every((part) => part.at || part.error);
  return { unknown, doctor: parts.doctor.data, lines: loaded ? lines({ ...parts, groups, name, image, failed }, can, counts) : null };
}

// lines are {bad, name, text, to, way}, the bad ones first, and last those that are calm: they need nobody.
function lines({ jobs, admissions, stats, webhooks, nodes, doctor, groups, name, image, failed }, can, counts) {
  const found = [];
  const add = (bad, who, text, to_, way = a.look) => found.push({ bad, name: line(who, 160), text: line(text, 240), to: to_, way });
  for (const j of jobs.data || []) {
    const halted = j.state === "halted", task = halted && failed.find((t) => t.job === j.id), why = task ? `${name(task.device)} ${word("taskCode", task.code)}` : word("jobReason", j.reason, j);
    if (!waits(j)) {
      found.push({ bad: -1, name: named(j, image), text: a.rolls(j.counts, ended(j.counts), j.stage, j.spec.stages?.length), to: to(["jobs", j.id]), way: a.look });
      continue;
    }
    add(halted, named(j, image), halted ? a.halted(why) : why, to(["jobs", j.id]), halted || !can("jobs") ? a.look : a.continue);
  }
  for (const h of webhooks.data?.items || []) if (h.state !== "active") add(true, h.url, word("webhookReason", h.state, h), to(["webhooks"]), a.test);
  for (const [part, why] of Object.entries(nodes.data?.down || {})) add(true, a.node, a.down(part, why), can("admin") ? to(["nodes"]) : to(["stats"]));
  for (const node of stats.data?.nodes_missing || []) add(true, node, a.silent, can("admin") ? to(["nodes"]) : to(["stats"]));
  const claimed = admissions.data?.items || [];
  for (const d of claimed) if (d.state === "contested") add(true, d.name || d.id, a.contested, to(["devices", d.id]), a.compare);
  for (const { cause, devices } of groups) {
    for (const id of devices.length > FEW ? [] : devices) add(true, name(id), a.cause(1, word("cause", cause)), to(["devices", id]));
    if (devices.length > FEW) add(true, a.devices(devices.length), a.cause(devices.length, word("cause", cause)), to(["devices"], { select: `device in (${devices.slice(0, 100).join()})` }));
  }
  const door = can("devices:write") ? to(["admissions"]) : to(["devices"], { state: "pending" });
  const copies = claimed.filter((d) => d.admission && d.client && d.pending.some((w) => w.client !== d.client));
  for (const d of copies) add(false, d.name || d.id, a.copy(d.transport !== ""), door, a.compare);
  const fresh = counts.pending - copies.length, one = fresh === 1 && claimed.find((d) => d.pending.length && !copies.includes(d));
  if (fresh > 0) add(false, one ? one.name || one.id : a.devices(fresh), a.waits(fresh), door, a.approve);
  for (const f of doctor.data?.findings || []) {
    if (f.severity === "info" || f.setting === "devices") continue; // contested devices have their own lines
    add(f.severity === "error", "", capital(f.message), to(["doctor"]), s.pages.doctor);
  }
  return found.sort((x, y) => y.bad - x.bad);
}

export function Attention({ lines: all, unknown }) {
  const rest = unknown.length > 0 && html`<p class="told">${a.unknown(unknown.join(", "))}</p>`;
  const wrong = all?.filter((x) => x.bad >= 0).length;
  const list = all?.length > 0 && html`<ul class="wrong">${all.map((x, i) => html`<li key=${i}>
      <span class=${["", "warn", "bad"][x.bad + 1]} aria-hidden="true">${["▶", "◐", "✕"][x.bad + 1]}</span><span>${x.name && html`<b><bdi>${x.name}</bdi></b> `}<bdi>${x.text}</bdi></span><${Link} class="button small" href=${x.to} aria-label=${`${x.way}: ${x.name || x.text}`}>${x.way}<//></li>`)}</ul>`;
  if (wrong) return html`<${Panel} title=${a.title(wrong)}>${list}${rest}<//>`;
  return html`<section class="panel"><p class="told"><span class=${all ? "ok" : ""} aria-hidden="true">${all ? "✓" : "…"}</span> ${all ? a.none : s.loading}</p>${list}${rest}</section>`;
}
