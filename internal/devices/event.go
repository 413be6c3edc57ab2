package devices

import (
	"encoding/json"
	"slices"
	"strings"
	"time"
)

// Event is something that happened to a device, or to a job. fleet.Publisher adds the node.
type Event struct {
	Kind    EventKind
	Device  ID
	Webhook string // id of the webhook, of kinds of webhooks; they have no device
	Job     string // id of the job, of kinds with HasOwner; those of jobs have neither device nor session nor epoch
	Subject string // further subject tokens after the kind, e.g. the notification's method; already safe
	Session string
	Epoch   Epoch
	Seq     int64
	Time    time.Time
	// MsgID deduplicates the event in the stream; empty for kinds that are not stored.
	MsgID string
	// Fields are the members the kind adds, as `"name":value` pairs joined by
	// commas, valid JSON.
	Fields json.RawMessage
}

// EventKind is the last fixed token of an event's subject.
type EventKind string

// Event kinds. Messages and silent channels are never stored in the stream.
const (
	EventOnline       EventKind = "online"
	EventOffline      EventKind = "offline"
	EventCatalog      EventKind = "catalog"
	EventNotification EventKind = "notifications"
	EventMessage      EventKind = "messages"
	EventPhoto        EventKind = "photo"
	EventPending      EventKind = "pending"
	EventContested    EventKind = "contested"
	EventFirmware     EventKind = "firmware"
	EventSilent       EventKind = "udp.silent"

	EventTask         EventKind = "task"
	EventJobStarted   EventKind = "job.started"
	EventJobStage     EventKind = "job.stage"
	EventJobPaused    EventKind = "job.paused"
	EventJobHalted    EventKind = "job.halted"
	EventJobResumed   EventKind = "job.resumed"
	EventJobDone      EventKind = "job.done"
	EventJobCancelled EventKind = "job.cancelled"
	EventJobPhase     EventKind = "job.phase"

	EventWebhookDisabled EventKind = "webhook.disabled"
)

// jobPrefix begins the kinds of jobs.
const jobPrefix = "job."

// OfJob reports whether a kind is one of jobs, whose events have no device.
func (k EventKind) OfJob() bool { return strings.HasPrefix(string(k), jobPrefix) }

// webhookPrefix begins the kinds of webhooks.
const webhookPrefix = "webhook."

// OfWebhook returns the last token of the subject of a kind of webhooks, and whether it is one. Such events have the id of the key that created the webhook.
func (k EventKind) OfWebhook() (token string, ok bool) {
	return strings.CutPrefix(string(k), webhookPrefix)
}

// WebhookEvent returns the kind of webhooks that has this last token of its subject.
func WebhookEvent(token string) EventKind { return EventKind(webhookPrefix + token) }

// HasOwner reports whether the events of a kind are about a job or a task of one, and have its owner.
func (k EventKind) HasOwner() bool { return k.OfJob() || k == EventTask }

// JobToken returns the last token of the subject of a kind with HasOwner.
func (k EventKind) JobToken() string { return strings.TrimPrefix(string(k), jobPrefix) }

// JobEvent returns the kind with HasOwner that has this last token of its subject.
func JobEvent(token string) EventKind {
	if token == string(EventTask) {
		return EventTask
	}
	return EventKind(jobPrefix + token)
}

// EventInfo describes an event kind: its text in docs/reference/events.md, and the
// stream that keeps it.
type EventInfo struct {
	Kind   EventKind
	Suffix string // further tokens of the subject
	When   string
	Adds   string
	Stored bool
	Stream EventStream // if Stored
}

const jobAdds = "`state`, `reason`, `action`, `stage`, `round`, `counts`, `note`, `owner`, `created_by`"

// EventKinds lists all kinds.
var EventKinds = []EventInfo{
	{EventOnline, "", "a connection was accepted", "`transport`, `client`", true, EventsStream},
	{EventOffline, "", "the connection ended", "`reason`", true, EventsStream},
	{EventCatalog, "", "the device's tools differ from before; published after the database has them", "`catalog`, `added`, `removed`, `changed`, `partial`", true, EventsStream},
	{EventNotification, ".<method>", "the device sent an MCP notification", "`method`, `params`", true, NotificationsStream},
	{EventPhoto, "", "the device uploaded a photo or snapshot", "`photo`, `question`, `bytes`", true, EventsStream},
	{EventPending, "", "the device got an activation code and is pending approval", "`client`, `known` (true: another client of a known device id)", true, EventsStream},
	{EventContested, "", "a connection was refused because two clients use the device id, or a [proof](../devices.md#chip-keys) for it was",
		"`client`, `reason`: `fight`; or `wrong_proof`, `other_device` (the serial number proves another device), `other_serial` (another one proves this device), with `serial`", true, EventsStream},
	{EventFirmware, "", "an OTA check shows another [image](../firmware.md#what-a-device-runs) than the last one, or again the one from before a job whose image the device got; published after the database has it",
		"`from` and `to`, each with `version` and `elf_sha256`, `board`, `cause`: `job` (a firmware job gave it), `rolled_back` (during such a job the device went back to what it ran before), `foreign` (fleetd did not give it)", true, EventsStream},
	{EventTask, "", "a task of a [job](../jobs.md) ended, or failed and waits to be repeated; its outcome is committed",
		"`job`, `round`, `attempt`, `state`, `outcome`, `code`, `late`, `call`, `owner`", true, JobsStream},
	{EventJobStarted, "", "its first task began", jobAdds, true, JobsStream},
	{EventJobStage, "", "its next stage opened", jobAdds, true, JobsStream},
	{EventJobPaused, "", "a person paused it", jobAdds, true, JobsStream},
	{EventJobHalted, "", "a rule halted it; `reason` names it", jobAdds, true, JobsStream},
	{EventJobResumed, "", "it goes on after it was paused or halted, or tasks of an ended job are repeated", jobAdds, true, JobsStream},
	{EventJobDone, "", "its last task ended, or its deadline passed", jobAdds, true, JobsStream},
	{EventJobCancelled, "", "a person cancelled it; tasks that run end by themselves", jobAdds, true, JobsStream},
	{EventJobPhase, "", "a task of a [firmware job](../firmware.md) went on, or got more of its image, at most every 15 seconds", "`job`, `device`, `phase`, `gate`, `bytes`, `size`, `owner`", false, 0},
	{EventWebhookDisabled, "", "a [webhook](../webhooks.md) was disabled, because its receiver accepted nothing for three days", "`webhook`, `failing_since`, `last_error`, `owner`, `created_by`", true, EventsStream},
	{EventMessage, ".<type>", "every other message of the device: `listen`, `abort`, `goodbye`, `iot` ..., except `hello` and `mcp`", "`message` (untouched)", false, 0},
	{EventSilent, "", "a conversation over UDP is open for 10 seconds and no packet was accepted; once per conversation", "`conversation` (its id), `packets` (how many named it)", false, 0},
}

// StoredKinds returns the kinds that these streams keep, or any stream if none is given.
func StoredKinds(streams ...EventStream) (kinds []EventKind) {
	for _, k := range EventKinds {
		if k.Stored && (len(streams) == 0 || slices.Contains(streams, k.Stream)) {
			kinds = append(kinds, k.Kind)
		}
	}
	return kinds
}
