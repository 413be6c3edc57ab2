package devices

import "time"

// ClaimKind says why a node claims a device.
type ClaimKind string

// Claims. The clocks of two nodes differ, so that of two connections the newer
// one may have the lower epoch; a connect claim therefore wins over whatever is
// held, and the loser's epoch comes back for the winner to rise above.
const (
	ClaimConnect  ClaimKind = "connect"  // the device has just connected here
	ClaimReassert ClaimKind = "reassert" // it still is; the lower epoch gives way
	ClaimAnswer   ClaimKind = "answer"   // a connect claim was obeyed
)

// Claim says that a node holds a device's session, or gave it up.
type Claim struct {
	Device ID
	Kind   ClaimKind
	Node   string
	Epoch  Epoch
	// Conversation is, in an answer, the id of the UDP conversation that ended
	// with the session: the device must be told goodbye with it.
	Conversation string
	// Generation is that of the credentials which the device came with: older
	// ones end everywhere.
	Generation int64
}

// Lease is a node's sign of life in the database.
type Lease struct {
	Node     string
	Instance string // of one start
	Beat     int64  // counts up while it lives
	Started  time.Time
	Version  string
	API      string
	Devices  int
	Stamps   bool // what it asks other nodes carries a stamp
}

// News is what one node tells the others that no database keeps.
type News struct {
	Spoken   *Spoken   `json:"spoken,omitempty"`
	Disputed *Disputed `json:"disputed,omitempty"`
}

// Spoken is the activation code that a waiting client speaks.
type Spoken struct {
	Device    ID     `json:"device"`
	ClientID  string `json:"client_id"`
	Code      string `json:"code"`
	Challenge string `json:"challenge"`
	// Renewal counts the challenges that this code had before.
	Renewal int `json:"renewal,omitempty"`
	// Known says that another client is admitted under the id.
	Known bool `json:"known,omitempty"`
	// Facts are what the device reported.
	Facts Facts `json:"facts,omitzero"`
}

// Disputed is the news that a device's proof was refused.
type Disputed struct {
	Device ID      `json:"device"`
	Reason Dispute `json:"reason"`
}

// Question is one that only the node which holds a device can answer.
type Question string

// Questions.
const (
	AskView    Question = "view"    // how is it connected?
	AskRefresh Question = "refresh" // the same, once its tools are read again
)
