// Package audit keeps the audit log: every call of a tool, every refusal, and every change of keys,
// rules and credentials. The entries of one run of a node are chained by hashes with the fleet's key, so
// that missing or modified ones are detected. They are written in groups, without delaying callers.
package audit

import (
	"encoding/json"
	"time"
)

// Kind is the subject of an entry.
type Kind string

// Kinds of entries.
const (
	KindCall       Kind = "call"       // a tool, or another MCP request
	KindMessage    Kind = "message"    // a message for a device
	KindDevice     Kind = "device"     // approve, revoke, forget, rotate, rename and so on; see Action
	KindKey        Kind = "key"        // an API key was created or revoked
	KindPolicy     Kind = "policy"     // the rules of the tool guard changed
	KindRefusal    Kind = "refusal"    // of any other request
	KindRun        Kind = "run"        // the node started, or stopped cleanly
	KindCredential Kind = "credential" // activation keys, admission by proof
)

// Auditor records who did what. Record never blocks and never fails; entries that cannot be
// kept leave a visible gap.
type Auditor interface {
	Record(e Entry)
}

// Entry is one entry of the log.
type Entry struct {
	At   time.Time `json:"at"`
	Kind Kind      `json:"kind"`
	// Call is the id of a call, raw request or message; empty in older entries.
	Call string `json:"call,omitempty"`
	// Action is the called tool or MCP method, the type of the message, or the action on a device,
	// key or policy.
	Action string `json:"action"`
	Device string `json:"device,omitempty"`
	// Key and Name are the caller's, Via is the interface and From the peer's address.
	Key  string `json:"key,omitempty"`
	Name string `json:"name,omitempty"`
	Via  string `json:"via,omitempty"`
	From string `json:"from,omitempty"`
	// Through is the id of the console key that the caller used.
	Through string `json:"through,omitempty"`
	// Digest is the SHA-256 of the arguments; zero without arguments. Arguments are kept only if the
	// policy requires it.
	Digest    Hash            `json:"digest,omitzero"`
	Arguments json.RawMessage `json:"arguments,omitempty"`
	// Cut means that the arguments were too long to be kept.
	Cut bool `json:"arguments_cut,omitempty"`
	// Outcome is `ok`, `tool_error`, `restarting`, or an error code; Rule is the rule that
	// refused.
	Outcome string `json:"outcome"`
	Rule    string `json:"rule,omitempty"`
	Detail  string `json:"detail,omitempty"`
	// Held is the node that held the device, if it is not the node that writes the entry.
	Held     string        `json:"held,omitempty"`
	Duration time.Duration `json:"duration_ns,omitempty"`
	// Count is the number of entries that this one replaces, if there were too many to write each
	// one.
	Count int64 `json:"count,omitempty"`
}
