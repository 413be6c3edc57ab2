package devices

import (
	"encoding/json"
	"time"
)

// Event is something that happened to a device. fleet.Publisher adds the node.
type Event struct {
	Kind    EventKind
	Device  ID
	Subject string // further subject tokens behind the kind, e.g. the notification's method; already safe
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
	EventSilent       EventKind = "udp.silent"
)
