package devices

import (
	"cmp"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"fleetd/internal/selector"
)

// Epoch orders the sessions of one device: microseconds since 1970 at Accept, always
// above every earlier epoch of the device. Together with a sequence number within it,
// it orders all effects of sessions.
type Epoch int64

// Transport is how a device is connected.
type Transport string

// Transports. A device without one is offline.
const (
	TransportNone      Transport = ""
	TransportWebSocket Transport = "websocket"
	TransportMQTT      Transport = "mqtt"
)

// Admission is whether a device belongs to the fleet.
type Admission string

// Admission states. A revoked device was a member and needs a new approval.
const (
	AdmissionMember  Admission = "member"
	AdmissionRevoked Admission = "revoked"
	// The last change of a device that is no longer known.
	AdmissionForgotten Admission = "forgotten" // by an operator
	AdmissionExpired   Admission = "expired"   // it joined by itself and never connected
)

// Device is a device apart from its connection: identity, admission, what it reported at
// its last OTA check, and what operators wrote. It is one row of the table `devices`.
type Device struct {
	ID        ID
	ClientID  string    // the admitted Client-Id, a UUID made by the firmware; empty if none yet
	Admission Admission // member or revoked
	Name      string
	Labels    map[string]string
	Prefer    Transport // what the OTA reply offers; empty for the node's default

	Facts

	FirstSeen time.Time // UTC, microseconds
	// Revision is that of the last change of the device.
	Revision int64
}

// Facts are what a device reported at its last OTA check.
type Facts struct {
	Board      string // board name, e.g. `bread-compact-wifi`
	Firmware   string // firmware version, e.g. `2.4.2`
	ELF        string // 64 hex digits, SHA-256 of the running image; the most exact identification of a firmware
	Chip       string
	Language   string
	Serial     string    // eFuse serial number, if the chip has one
	ActivateV2 bool      // Activation-Version 2
	CheckedAt  time.Time // by the clock of the node that answered the check; UTC, microseconds
}

// Map returns the facts with each text as do returns it.
func (f Facts) Map(do func(string) string) Facts {
	for _, text := range []*string{&f.Board, &f.Firmware, &f.ELF, &f.Chip, &f.Language, &f.Serial} {
		*text = do(*text)
	}
	return f
}

// Check is an OTA check: a device and what it reported. One that arrived before the stored one is ignored, and what it did not
// report stays as it is: see Facts.Over.
type Check struct {
	Device ID
	Facts
	// Details are Details as JSON, as the device sent them; empty if the check did not have them. They go to the database alone.
	Details string
}

// Over returns the facts of a check over those before it: what the check did not report is as
// before. An ELF belongs to a version: a check that reports the version alone has no ELF.
func (f Facts) Over(before Facts) Facts {
	if f.ELF == "" && (f.Firmware == "" || f.Firmware == before.Firmware) {
		f.ELF, f.ActivateV2 = before.ELF, before.ActivateV2
	}
	f.Board, f.Firmware, f.Chip = cmp.Or(f.Board, before.Board), cmp.Or(f.Firmware, before.Firmware), cmp.Or(f.Chip, before.Chip)
	f.Language, f.Serial = cmp.Or(f.Language, before.Language), cmp.Or(f.Serial, before.Serial)
	return f
}

// Selectable returns a device as selectors see it, without its tools.
func Selectable(d *Device, p *Presence) selector.Device {
	out := selector.Device{ID: string(d.ID), Name: d.Name, Board: d.Board, Chip: d.Chip, Firmware: d.Firmware, ELF: d.ELF, State: string(StateOffline),
		Labels: d.Labels, Online: p.Online, Transport: string(p.Transport), Node: p.Node, Reason: p.Reason, LastSeen: p.LastSeen}
	if p.Online {
		out.State = string(StateOnline)
	}
	return out
}

// Presence is the latest state of a device's connection: one row of the table
// `presence`. Writes with an older (Epoch, Seq) are ignored.
type Presence struct {
	Device      ID
	Epoch       Epoch
	Seq         int64
	Online      bool
	Node        string
	Session     string
	ClientID    string
	Transport   Transport
	Reason      string // why the last session ended; empty while online
	ConnectedAt time.Time
	LastSeen    time.Time
	// OfflineSince is when the device was last seen before it went offline; zero while it
	// is online, and if it never connected. The store sets it.
	OfflineSince time.Time
	// KeepCatalog means that the session does not know the device's last list: the stored
	// one is kept.
	KeepCatalog bool
	Generation  int64 `json:",omitzero"` // of the credentials that it connected with

	MCP      MCPState
	MCPError string
	Catalog  Hash // zero if unknown
	Partial  bool
	Tools    int
}

// Row is a device with its presence.
type Row struct {
	Device   Device
	Presence Presence // zero Epoch: never connected
}

// Hash is the SHA-256 of a tool list.
type Hash [32]byte

// String returns the hash as 64 lower-case hex digits; empty for the zero hash.
func (h Hash) String() string {
	if h == (Hash{}) {
		return ""
	}
	return hex.EncodeToString(h[:])
}

// ParseHash parses 64 hex digits; empty text is the zero hash.
func ParseHash(text string) (h Hash, err error) {
	if text == "" {
		return h, nil
	}
	if len(text) != 2*len(h) {
		return h, fmt.Errorf("a catalog hash has 64 hex digits, this has %d characters", len(text))
	}
	if _, err = hex.Decode(h[:], []byte(text)); err != nil {
		return Hash{}, fmt.Errorf("a catalog hash has 64 hex digits: %w", err)
	}
	return h, nil
}

// CatalogText is a stored tool list: the JSON array of tool objects exactly as the device
// sent them, pages joined. Hash is the SHA-256 of Tools.
type CatalogText struct {
	Hash      Hash
	Tools     json.RawMessage
	Count     int
	FirstSeen time.Time
}

// HistoryEntry records that a device had this catalog from At on, under this firmware.
// Entries are never coalesced; (Device, Epoch, Seq) identifies one.
type HistoryEntry struct {
	Device   ID
	Epoch    Epoch
	Seq      int64
	Catalog  Hash
	Firmware string
	ELF      string
	Partial  bool
	At       time.Time
}

// Exception is the record of a device whose credentials do not have generation 0:
// rotated, revoked or forgotten; or of which a client is refused. It is kept after the
// device's row is deleted.
type Exception struct {
	Device     ID
	Generation int64
	Revoked    bool // no credential is valid until the device is approved
	Reason     string
	ChangedAt  time.Time
	// Previous is also valid until PreviousUntil, or until the device has connected with
	// Generation.
	Previous      int64     `json:",omitzero"`
	PreviousUntil time.Time `json:",omitzero"`
	Refused       Refused   `json:",omitzero"`
}

// Errors of the stores.
var (
	// ErrNotFound is returned for a device, catalog or entry that is not stored.
	ErrNotFound = errors.New("not found")
	// ErrPruned is returned for changes that were deleted from the log.
	ErrPruned = errors.New("deleted from the log")
	// ErrDatabase wraps every failure to reach or use the database.
	ErrDatabase = errors.New("database unavailable")
	// ErrUncertain is returned, with ErrDatabase, if the write may have been committed.
	ErrUncertain = errors.New("the write may have been committed")
)

// Identity is the device at the other end of a connection, as the front end found it.
type Identity struct {
	Device    ID
	ClientID  string
	Transport Transport
	Remote    string // address, for logs
	// Verified means that credentials of Generation were presented. Accept checks them
	// again, since they may have been revoked while the connection was opened.
	Verified   bool
	Generation int64
	// OfClient means that they are credentials of ClientID, and not of whichever client is admitted.
	OfClient bool
}

// View is the complete state of a device.
type View struct {
	Device       Device
	Presence     Presence
	State        State
	CatalogState CatalogState
	AudioOpen    bool
	AudioPackets uint64
	AudioDropped uint64
	Credentials  Credentials
	Pending      []PendingClient // for approval as this device, in order of their first checks
	// Dormant: it is offline and was last connected by WebSocket, so that it connects when somebody wakes it.
	Dormant bool
}
