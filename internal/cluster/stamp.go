package cluster

import (
	"errors"
	"strconv"
	"strings"
	"sync"

	"github.com/nats-io/nats.go"

	"fleetd/internal/access"
	"fleetd/internal/devices"
)

// A stamp makes a hop valid once, without comparing the clocks of two machines. A node
// numbers its hops; the number is the last token of the reply subject. The holder
// records which numbers it has accepted. After a restart of the holder, and for a
// sender that is new to it, it has no record: it then answers with its nonce, and
// accepts the hop when it is sent again, under the same number, with the nonce signed.
const (
	// HeaderStamp contains, separated by blanks: the holder's nonce (noNonce if
	// unknown), the reply subject, and a signature of both, the caller, the verb, the device and the body. Servers between two clusters rewrite the reply subject of a message, and
	// leave this header alone.
	HeaderStamp = "Fleetd-Hop-Stamp"
	// HeaderAgain is a holder's nonce in an answer without a body: the hop was not
	// accepted, and may be sent once more.
	HeaderAgain = "Fleetd-Hop-Again"
)

const (
	// hopWindow is by how many numbers a hop may be older than the newest one of
	// its node: concurrent hops arrive out of order.
	hopWindow = 8192
	// maxSenders is how many processes of other nodes are remembered; a forgotten
	// one has to send its next hop twice.
	maxSenders = 256
	// maxResends is how often one hop is sent again: the device may have moved to
	// another node meanwhile.
	maxResends = 2
)

// noNonce marks an unknown nonce; a header cannot begin with a blank.
const noNonce = "-"

// stampKind separates signatures of stamps from those of hops.
const stampKind = "stamped "

func (l *Link) stamp(id devices.ID, verb, nonce, reply, caller string, body []byte) string {
	return nonce + " " + reply + " " + l.opt.Mint.HopSignature(string(id), stampKind+verb, stamped(nonce, reply, caller, body))
}

// stamped is what a stamp signs; no header contains a line break.
func stamped(nonce, reply, caller string, body []byte) string {
	return nonce + "\n" + reply + "\n" + caller + "\n" + string(body)
}

var (
	// errNonceRequired means that a hop must be sent again with this node's nonce.
	errNonceRequired = errors.New("the hop must be sent again, with the nonce of this node")
	// errReplayed means that a request was accepted before.
	errReplayed = errors.New("this request of another node was accepted before; somebody may be replaying recorded messages")
)

// verifyStamp checks that another node signed a hop and that it was not accepted before.
func (l *Link) verifyStamp(msg *nats.Msg, stamp, caller string, r *request) error {
	nonce, rest, _ := strings.Cut(stamp, " ")
	reply, signature, _ := strings.Cut(rest, " ")
	if !l.opt.Mint.IsHop(signature, string(r.device), stampKind+r.verb, stamped(nonce, reply, caller, msg.Data)) {
		return access.ErrToken
	}
	return l.replays.accept(reply, nonce == l.nonce)
}

// replayFilter records which hops have been accepted, by the process that sent them:
// its reply subjects have one prefix. Only signed hops get here.
type replayFilter struct {
	mu   sync.Mutex
	from map[string]*window
	uses uint64
}

// window records which of the last hopWindow numbers were accepted.
type window struct {
	floor uint64 // the first number accepted; an earlier process may have accepted lower ones
	last  uint64 // the highest
	bits  [hopWindow / 64]uint64
	used  uint64
}

// accept records the hop with this reply subject. fresh means that it contains this
// process's nonce. The error is errNonceRequired, errReplayed or access.ErrToken.
func (t *replayFilter) accept(subject string, fresh bool) error {
	dot := strings.LastIndexByte(subject, '.')
	n, err := strconv.ParseUint(subject[dot+1:], 36, 64)
	if err != nil || dot < 0 || strconv.FormatUint(n, 36) != subject[dot+1:] { // only the canonical form of a number
		return access.ErrToken
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	w := t.from[subject[:dot]]
	if w == nil {
		if !fresh {
			return errNonceRequired
		}
		w = &window{floor: n, last: n}
		t.addLocked(strings.Clone(subject[:dot]), w)
	}
	t.uses++
	w.used = t.uses
	if n < w.floor && !fresh {
		return errNonceRequired
	}
	if !w.add(n) {
		return errReplayed
	}
	return nil
}

// addLocked adds a sender; the least recently used one is dropped.
func (t *replayFilter) addLocked(prefix string, w *window) {
	if t.from == nil {
		t.from = map[string]*window{}
	}
	if len(t.from) >= maxSenders {
		oldest := ""
		for p, x := range t.from {
			if oldest == "" || x.used < t.from[oldest].used {
				oldest = p
			}
		}
		delete(t.from, oldest)
	}
	t.from[prefix] = w
}

// add records a number; false if it was recorded before, or is older than the window.
func (w *window) add(n uint64) bool {
	if n+hopWindow <= w.last {
		return false
	}
	if n > w.last+hopWindow {
		w.last = n - hopWindow
	}
	for w.last < n { // clear the bits of numbers that leave the window
		w.last++
		w.bits[w.last%hopWindow/64] &^= 1 << (w.last % 64)
	}
	word, bit := &w.bits[n%hopWindow/64], uint64(1)<<(n%64)
	if *word&bit != 0 {
		return false
	}
	*word |= bit
	return true
}
