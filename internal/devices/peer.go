package devices

import (
	"context"
	"net/netip"
	"time"
)

// ClaimKind is the reason of a claim.
type ClaimKind string

// Claims. The clocks of two nodes differ, so the newer of two connections may have the
// lower epoch. A connect claim therefore wins over an existing session; the loser
// answers with its epoch, and the winner raises its own above that.
const (
	ClaimConnect  ClaimKind = "connect"  // the device has just connected here
	ClaimReassert ClaimKind = "reassert" // the device is still connected here; the lower epoch ends
	ClaimAnswer   ClaimKind = "answer"   // the session was ended because of a connect claim
)

// Claim is the message that a node holds a device's session, or ended it.
type Claim struct {
	Kind   ClaimKind `json:"kind"`
	Device ID        `json:"device"`
	Node   string    `json:"node"`
	Epoch  Epoch     `json:"epoch"`
	// Conversation is, in an answer, the id of the UDP conversation that ended with the
	// session: the device needs a goodbye for it.
	Conversation string `json:"conversation,omitempty"`
	// Generation is that of the device's credentials: older ones end on all nodes.
	Generation int64 `json:"generation,omitempty"`
}

// Gather sends a question of a kind, which is JSON, to the named nodes and returns their answers by node, and the nodes
// that did not answer within a second; this node is left out. It is safe for concurrent use.
type Gather func(ctx context.Context, kind string, question []byte, nodes []string) (answers map[string][]byte, missing []string)

// Lease is a node's lease in the database.
type Lease struct {
	Node     string
	Instance string // of one process
	Beat     int64  // counter, increased at each renewal
	Started  time.Time
	Version  string
	API      string
	Devices  int
}

// News is information that nodes send each other and that is not in the database.
type News struct {
	Pending *PendingClient `json:"spoken,omitempty"`
	Dispute *DisputeNews   `json:"disputed,omitempty"`
}

// PendingClient is a client that waits for approval, with its activation code.
type PendingClient struct {
	Device    ID     `json:"device"`
	ClientID  string `json:"client_id"`
	Code      string `json:"code"`
	Challenge string `json:"challenge"`
	// Renewal counts the earlier challenges of this code.
	Renewal int `json:"renewal,omitempty"`
	// Known reports that another client of the device is admitted.
	Known bool `json:"known,omitempty"`
	// Address and Since are what the node that received its check knows.
	Address netip.Addr `json:"address,omitzero"`
	Since   time.Time  `json:"since,omitzero"`
	// Facts are what the device reported.
	Facts Facts `json:"facts,omitzero"`
}

// DisputeNews is the news that a proof for a device was refused.
type DisputeNews struct {
	Device ID      `json:"device"`
	Reason Dispute `json:"reason"`
}

// Query is a request that only the node that holds a device can answer.
type Query string

// Queries.
const (
	QueryView    Query = "view"    // the state of its connection
	QueryRefresh Query = "refresh" // the same, after its tools were listed again
)
