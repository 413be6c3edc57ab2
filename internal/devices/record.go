package devices

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"time"
)

// Epoch is the ownership generation of one device: microseconds since 1970 at
// Accept, always above every epoch seen before for that device. Together with
// a sequence number that counts within it, it orders every effect.
type Epoch int64

// Transport names a way a device can be connected.
type Transport string

// Transports. A device that has none is offline.
const (
	TransportNone      Transport = ""
	TransportWebSocket Transport = "websocket"
	TransportMQTT      Transport = "mqtt"
)

// Admission says whether a device belongs to the fleet.
type Admission string

// Admission states. A revoked device was a member and has to be approved again.
const (
	AdmissionMember  Admission = "member"
	AdmissionRevoked Admission = "revoked"
	// The last change of a device that is not known any more.
	AdmissionForgotten Admission = "forgotten" // by an operator
	AdmissionExpired   Admission = "expired"   // it joined by itself, and never connected
)

// Device is what is known of a device apart from its connection: identity,
// admission, what it said of itself at its last OTA check, and what the
// operator wrote on it. It is one row of the table `devices`.
type Device struct {
	ID        ID
	ClientID  string    // the admitted Client-Id, a UUID made by the firmware; empty if none yet
	Admission Admission // member or revoked
	Name      string
	Labels    map[string]string
	Prefer    Transport // what the OTA reply offers; empty for the node's default

	Board      string // board name, e.g. `bread-compact-wifi`
	Firmware   string // firmware version, e.g. `2.4.2`
	ELF        string // 64 hex digits, SHA-256 of the running image; the strongest name of a firmware
	Chip       string
	Language   string
	Serial     string // eFuse serial number, if the chip has one
	ActivateV2 bool   // Activation-Version 2

	FirstSeen time.Time // UTC, microseconds
	CheckedAt time.Time // last OTA check
	// Revision is that of the last change of what is decided.
	Revision int64
}

// Facts are what a device reported at an OTA check. An older CheckedAt replaces
// nothing, and an empty Serial keeps the stored one.
type Facts struct {
	Device     ID
	Board      string
	Firmware   string
	ELF        string
	Chip       string
	Language   string
	Serial     string
	ActivateV2 bool
	CheckedAt  time.Time
}

// Presence is the newest known state of a device's connection: one row of the
// table `presence`, fenced by (Epoch, Seq): an older pair changes nothing.
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
	// OfflineSince is when it was last seen before it went offline; zero while it is
	// online, and if it never was. The store sets it.
	OfflineSince time.Time
	// KeepCatalog: the list that the device had is not known to the session; what is
	// stored of it stays.
	KeepCatalog bool
	Generation  int64 `json:",omitzero"` // of the credentials that it came with

	MCP      MCPState
	MCPError string
	Catalog  Hash // zero if unknown
	Partial  bool
	Tools    int
}

// Row is a device with its presence, as lists show it.
type Row struct {
	Device   Device
	Presence Presence // zero Epoch: never connected
}

// Hash is the SHA-256 of a tool list.
type Hash [32]byte

// String is the hash as 64 lower-case hex digits; empty for the zero hash.
func (h Hash) String() string {
	if h == (Hash{}) {
		return ""
	}
	return hex.EncodeToString(h[:])
}

// ParseHash reads 64 hex digits; empty text is the zero hash.
func ParseHash(text string) (h Hash, err error) {
	if text == "" {
		return h, nil
	}
	if len(text) != 2*len(h) {
		return h, fmt.Errorf("a catalog is named by 64 hex digits, this has %d characters", len(text))
	}
	if _, err = hex.Decode(h[:], []byte(text)); err != nil {
		return Hash{}, fmt.Errorf("a catalog is named by 64 hex digits: %w", err)
	}
	return h, nil
}

// CatalogText is one stored tool list: the JSON array of tool objects exactly
// as the device sent them, page borders left out. Its Hash is the SHA-256 of
// Tools.
type CatalogText struct {
	Hash      Hash
	Tools     json.RawMessage
	Count     int
	FirstSeen time.Time
}

// HistoryEntry says that from At on a device had this catalog under this
// firmware. Entries are never coalesced; (Device, Epoch, Seq) names one.
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

// Exception is the record of a device whose credentials are not those of
// generation 0: rotated, revoked or forgotten. It outlives the device's row.
type Exception struct {
	Device     ID
	Generation int64
	Revoked    bool // no credential is valid until the device is approved
	Reason     string
	ChangedAt  time.Time
	// Previous is valid, too, until PreviousUntil, or until the device has
	// connected with Generation.
	Previous      int64     `json:",omitzero"`
	PreviousUntil time.Time `json:",omitzero"`
}

// Errors of the record keepers.
var (
	// ErrNotFound is returned for a device, catalog or entry that is not stored.
	ErrNotFound = errors.New("not found")
	// ErrPruned is returned for a change that the log does not keep any more.
	ErrPruned = errors.New("not kept any more")
	// ErrDatabase wraps every failure to reach or use the database.
	ErrDatabase = errors.New("database unavailable")
	// ErrUncertain is returned, with ErrDatabase, for what may have been written.
	ErrUncertain = errors.New("it may have been written")
)

// Identity is who a front end found at the other end of a connection.
type Identity struct {
	Device    ID
	ClientID  string
	Transport Transport
	Remote    string // address, for logs
	// Verified says that credentials of Generation were presented. They are
	// checked against the device once more when it is accepted, since they may
	// have been revoked while the connection was being opened.
	Verified   bool
	Generation int64
}

// View is all there is to say about one device.
type View struct {
	Device       Device
	Presence     Presence
	State        State
	CatalogState CatalogState
	AudioOpen    bool
	AudioPackets uint64
	AudioDropped uint64
	Credentials  Credentials
	Pending      string // a Client-Id that waits for approval; empty: none does
}
