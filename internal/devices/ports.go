package devices

import (
	"context"
	"encoding/json"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/audit"
	"fleetd/internal/envelope"
)

// Records reads and writes devices and their presence. Reads go to the
// database and wrap ErrDatabase when it is away; writes are queued, coalesced
// per device and committed in groups, and never block or fail.
type Records interface {
	// Find returns one device, or ErrNotFound.
	Find(ctx context.Context, id ID) (Row, error)
	// List returns at most q.Limit rows in id order.
	List(ctx context.Context, q Query) ([]Row, error)
	// SaveDevice queues the row; a newer one for the same device replaces one
	// still waiting. Name, Labels and Prefer are part of it.
	SaveDevice(d Device)
	// SavePresence queues the row; it is written only if (Epoch, Seq) is above
	// the stored pair.
	SavePresence(p Presence)
}

// Catalogs keeps tool lists by content, and who had which when.
type Catalogs interface {
	// Catalog returns one stored list, or ErrNotFound.
	Catalog(ctx context.Context, h Hash) (CatalogText, error)
	// History returns the entries of one device, newest first, at most limit,
	// older than the pair (epoch, seq) unless that is zero.
	History(ctx context.Context, id ID, epoch Epoch, seq int64, limit int) ([]HistoryEntry, error)
	// SaveCatalog queues a history entry with the text of its catalog (text may
	// be shared and must not change; its Tools may be nil if the catalog is
	// known to be stored) and calls committed once both are in the database.
	// Entries are never coalesced. committed runs on the writer's goroutine and
	// must not block; it is not called if the node stops first. queued is false
	// if the entry is dropped, because as much as may already waits.
	SaveCatalog(e HistoryEntry, text CatalogText, committed func()) (queued bool)
	// KeepCatalog says that a device has this list, of which no entry has to be
	// made: it must not be deleted for its age, and is stored again if it was.
	// It is cheap enough to be called whenever a device's list was read.
	KeepCatalog(text CatalogText)
}

// Keeper holds what a node must know at start and operators change: who is a
// member, and whose credentials are exceptional.
type Keeper interface {
	// LoadDevices calls f for every row, in id order.
	LoadDevices(ctx context.Context, f func(Row) error) error
	// LoadExceptions returns all exceptions.
	LoadExceptions(ctx context.Context) ([]Exception, error)
	// SaveException queues the exception; the higher generation wins, on equal
	// generations the later ChangedAt.
	SaveException(e Exception)
	// Written waits until what was saved of a device, its row and its exceptions,
	// is in the database. It fails at once while that is away.
	Written(ctx context.Context, id ID) error
	// Forget removes the device, its presence and its history. Catalogs stay
	// until nothing names them any more.
	Forget(ctx context.Context, id ID) error
}

// Publisher takes events for the outside. Publish never blocks; an event that
// cannot be taken is counted by the publisher and dropped.
type Publisher interface {
	Publish(e Event)
}

// Directory tells the other nodes which devices this node holds.
type Directory interface {
	// Hold announces the device; calls for it now arrive at this node.
	Hold(id ID) error
	// Release takes the announcement back. Hold and Release of one device may
	// overlap; they are counted, not toggled.
	Release(id ID)
	// Claim tells every other node, which answer through Service.Claimed. It
	// never blocks; a claim that cannot be sent is made again within a minute.
	Claim(c Claim)
	// Tell passes news on to every other node, which take them by
	// Service.Learn. It never blocks; what is lost is made good by
	// Service.Reload.
	Tell(n News)
}

// Router carries what is meant for a device one hop to the node that holds it.
// Every method fails with ErrNoHolder at once if no node does.
type Router interface {
	// Forward carries a tool call.
	Forward(ctx context.Context, c ToolCall) (ToolResult, error)
	// ForwardRPC carries a raw MCP request.
	ForwardRPC(ctx context.Context, c RPCCall) (RPCResult, error)
	// ForwardMessage carries a message other than MCP.
	ForwardMessage(ctx context.Context, m Message) error
	// Ask asks the holder, and returns what Service.Answer made there.
	Ask(ctx context.Context, id ID, q Question) ([]byte, error)
}

// AudioBus takes what devices say to whoever listens. Its methods never block
// and keep nothing of a frame.
type AudioBus interface {
	// Topic names where the frames of one device go, for PublishAudio.
	Topic(id ID) string
	// PublishAudio passes one frame on; false if it had to be dropped. seq
	// counts the frames of the conversation with this session id, from 1.
	PublishAudio(topic, session string, seq uint64, f envelope.Frame) bool
}

// Voice takes part in conversations inside this process, such as a bridge to a
// voice server. Its methods must not block. Each conversation has at most one
// Begin and exactly one End. The device does not wait for Begin: by a hair,
// Audio, Message and even End may come before it.
type Voice interface {
	// Begin is called once the device's hello was answered.
	Begin(c *Conversation)
	// Message is a message of the device other than hello and MCP.
	Message(c *Conversation, kind string, msg []byte)
	// Audio is one frame of the device, valid during the call only.
	Audio(c *Conversation, f envelope.Frame)
	// End says that the conversation is over, whoever ended it.
	End(c *Conversation)
}

// AudioPath carries frames to one device: its WebSocket, or a UDP channel.
type AudioPath interface {
	// SendAudio writes one Opus packet within a bounded time and keeps nothing
	// of it. An error means that this packet is lost; the path may live on.
	SendAudio(f envelope.Frame) error
	// Close gives the path up; no frame of the device comes from it afterwards.
	// It may be called any number of times.
	Close()
}

// Vision grants devices the right to upload photos.
type Vision interface {
	// Grant returns the URL and bearer token for `initialize`, and when the
	// token expires. An empty URL means photos are not offered.
	Grant(id ID, now time.Time) (url, token string, expires time.Time)
	// Snapshot returns a URL that takes one upload of the device, and the id
	// its photo will have.
	Snapshot(id ID, now time.Time) (url, photo string)
}

// Conn is one live transport connection to one device. Implementations accept
// calls from any goroutine.
type Conn interface {
	// SendControl writes one envelope, or queues it behind others, within a
	// bounded time, and does not keep msg. ErrOverloaded means that too much
	// waits already; the session is then closed as slow. Any error means that
	// no byte of msg reaches the device.
	SendControl(msg []byte) error
	// Close ends the connection for this reason; any number of times, by
	// anyone. It unblocks the reader and does not wait for it.
	Close(reason CloseReason)
}

// Event is something that happened to a device. Publisher adds the node.
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

// Warden keeps what decides who may do what: API keys, and the policy of the
// tool guard.
type Warden interface {
	// LoadKeys returns all keys, those that have ended included.
	LoadKeys(ctx context.Context) ([]access.Key, error)
	// SaveKey writes a key: a new one, or the end of one that is stored, which
	// nothing takes back.
	SaveKey(ctx context.Context, k access.Key) error
	// LoadPolicy returns the newest version; the zero Policy if there is none.
	LoadPolicy(ctx context.Context) (access.Policy, error)
	// SavePolicy stores a version beside the older ones. It fails with
	// ErrConflict if that version exists.
	SavePolicy(ctx context.Context, p access.Policy) error
}

// Auditor takes the record of who did what. Record never blocks and never
// fails; what cannot be kept leaves a gap that shows.
type Auditor interface {
	Record(e audit.Entry)
}
