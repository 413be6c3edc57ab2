package devices

import (
	"encoding/json"
	"time"
)

// The types below pass between adapters that may not know each other: events
// and photos on their way to the REST API, findings of the diagnosis.

// StreamEvent is one event read back from the stream.
type StreamEvent struct {
	ID     EventPosition // for resuming after this event
	Kind   EventKind
	Device ID
	Data   json.RawMessage // the payload as published
	Gap    bool            // events after the requested position are gone; Data has which
}

// EventQuery selects events. Empty fields select everything.
type EventQuery struct {
	Device ID
	Kind   EventKind
	// After is the position after which to start. The zero position means from now on, or
	// from Since on if that is set, or with FromStart from the first event there ever was.
	After     EventPosition
	Since     time.Time
	FromStart bool
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

// Node is one node of the fleet and what it carries.
type Node struct {
	Name    string    `json:"name"`
	Version string    `json:"version"`
	Started time.Time `json:"started"`
	Devices int       `json:"devices"`
	API     string    `json:"api"`
}

// Severity of a finding.
type Severity string

// Severities. An error strands or boot-loops devices.
const (
	SeverityError   Severity = "error"
	SeverityWarning Severity = "warning"
	SeverityInfo    Severity = "info"
)

// Finding is one thing the diagnosis noticed about the settings.
type Finding struct {
	Severity Severity `json:"severity"`
	Setting  string   `json:"setting"`
	Message  string   `json:"message"`
}

// Diagnosis is the world as one device sees it: the exact OTA reply, and what
// is wrong with it.
type Diagnosis struct {
	OTAURL   string          `json:"ota_url"`
	Device   ID              `json:"device"`
	Status   int             `json:"status"`
	Reply    json.RawMessage `json:"reply"`
	Findings []Finding       `json:"findings"`
}
