package devices

import (
	"encoding/json"
	"slices"
	"strings"
	"time"
)

// The types below are passed between adapters that do not import each other: events and
// photos for the REST API, findings of the diagnosis.

// StreamEvent is one event read from a stream.
type StreamEvent struct {
	ID     EventPosition // to resume after this event
	Stream EventStream   // that has the event
	Kind   EventKind
	Device ID              // empty for kinds of jobs
	Job    string          // id of the job, of kinds with HasOwner
	Owner  string          // of kinds with HasOwner and of webhooks: access.Principal.Owner of who created the job or webhook
	Data   json.RawMessage // the payload as published
	Gap    bool            // events after the requested position were deleted; Data has the range
}

// EventQuery selects events. Empty fields select everything.
type EventQuery struct {
	Device ID
	Kind   EventKind
	// After is the position to start after. The zero position means new events only, or
	// events since Since if that is set, or with FromStart all that are kept.
	After     EventPosition
	Since     time.Time
	FromStart bool
	NoJobs    bool // no events of jobs and tasks
}

// Check returns an error of CodeBadRequest if no stream has events that it selects.
func (q *EventQuery) Check() error {
	if q.Kind == "" {
		return nil
	}
	if _, ok := q.Kind.OfWebhook(); (ok || q.Kind.OfJob()) && q.Device != "" {
		return Errorf(CodeBadRequest, "events of type %s have no device; leave device out, or use the type task", q.Kind)
	}
	kinds := StoredKinds()
	if !slices.Contains(kinds, q.Kind) {
		return Errorf(CodeBadRequest, "type must be one of %s", strings.Join(Texts(kinds), ", "))
	}
	return nil
}

// Texts returns a list of texts with a type as plain texts, never nil.
func Texts[T ~string](list []T) []string {
	texts := make([]string, len(list))
	for i, text := range list {
		texts[i] = string(text)
	}
	return texts
}

// Photo describes one stored upload.
type Photo struct {
	ID       string    `json:"id"`
	Device   ID        `json:"device"`
	Question string    `json:"question"`
	Bytes    int64     `json:"bytes"`
	SHA256   string    `json:"sha256"`
	Kind     string    `json:"kind"` // camera or snapshot
	TakenAt  time.Time `json:"taken_at"`
}

// Node is one node of the fleet.
type Node struct {
	Name    string    `json:"name"`
	Version string    `json:"version"`
	Started time.Time `json:"started"`
	Devices int       `json:"devices"`
	API     string    `json:"api"`
}

// Severity of a finding.
type Severity string

// Severities. An error makes devices unreachable or lets them reboot in a loop.
const (
	SeverityError   Severity = "error"
	SeverityWarning Severity = "warning"
	SeverityInfo    Severity = "info"
)

// Finding is one problem that the diagnosis found in the settings.
type Finding struct {
	Severity Severity
	Setting  string
	Message  string
}

// Diagnosis is the exact OTA reply for one device, and the problems found in it.
type Diagnosis struct {
	OTAURL   string
	Device   ID
	Status   int
	Reply    json.RawMessage
	Findings []Finding
	Probe    Probe
}

// Probe is a download that takes the way of firmware images, and is none.
type Probe struct {
	URL    string // valid for some minutes
	Size   int64  // bytes
	SHA256 string // hex
}
