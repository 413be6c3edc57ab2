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

// Stamps make a hop good for one time, with no clock of two machines compared.
// A node counts its hops: the number ends the subject that it wants the answer
// on. The holder remembers which numbers it has taken. What it cannot tell, because it has just
// started or never heard of that node, it takes from those alone who know its
// nonce: it asks for the hop again, under the same number, with the nonce signed.
const (
	// HeaderStamp is the holder's nonce, at first noNonce, the subject for the
	// answer, and a signature of both and all that HeaderHop signs, with blanks
	// between them. Servers between two clusters write the reply of a message anew;
	// they leave this alone.
	HeaderStamp = "Fleetd-Hop-Stamp"
	// HeaderAgain is a holder's nonce in an answer without a body: the hop has not
	// been taken, and may be sent once more.
	HeaderAgain = "Fleetd-Hop-Again"
)

const (
	// hopWindow is how far behind the newest hop of a node another one may come:
	// those that wait for their turn pass each other.
	hopWindow = 8192
	// maxSenders bounds the starts of nodes that are remembered; one that was
	// forgotten is asked again.
	maxSenders = 256
	// maxAgain is how often one hop is made again: the device may have moved to
	// another node meanwhile.
	maxAgain = 2
)

// noNonce stands for one that is not known; headers begin with no blank.
const noNonce = "-"

// stampKind keeps signatures of stamps apart from those of hops.
const stampKind = "stamped "

func (l *Link) stamp(id devices.ID, verb, nonce, reply, caller string, body []byte) string {
	return nonce + " " + reply + " " + l.opt.Mint.HopSignature(string(id), stampKind+verb, stamped(nonce, reply, caller, body))
}

func stamped(nonce, reply, caller string, body []byte) []byte {
	b := make([]byte, 0, len(nonce)+len(reply)+len(caller)+len(body)+3)
	for _, line := range [...]string{nonce, reply, caller} { // no header has a line's end
		b = append(append(b, line...), '\n')
	}
	return append(b, body...)
}

var (
	// errAgain says that a hop must come again with this node's nonce.
	errAgain = errors.New("the hop must be made again, with this node's nonce")
	// errRepeated refuses what was taken before.
	errRepeated = errors.New("this request of another node was taken before: somebody repeats it")
)

// takeStamp tells whether a hop is another node's, and comes for the first time.
func (l *Link) takeStamp(msg *nats.Msg, stamp, caller string, r *request) error {
	nonce, rest, _ := strings.Cut(stamp, " ")
	reply, signature, _ := strings.Cut(rest, " ")
	if !l.opt.Mint.IsHop(signature, string(r.device), stampKind+r.verb, stamped(nonce, reply, caller, msg.Data)) {
		return access.ErrToken
	}
	return l.taken.take(reply, nonce == l.nonce)
}

// taken remembers which hops have been taken, by the start of a node: all its
// answers have one prefix. Only signed hops get here.
type taken struct {
	mu   sync.Mutex
	from map[string]*window
	uses uint64
}

// window holds which of the last numbers were taken.
type window struct {
	floor uint64 // the first number that was taken; those below may have been taken before this process began
	last  uint64 // the highest
	bits  [hopWindow / 64]uint64
	used  uint64
}

// take notes the hop that wants its answer on this subject. fresh says that it
// was made for this start of this node. The error is errAgain or errRepeated.
func (t *taken) take(subject string, fresh bool) error {
	dot := strings.LastIndexByte(subject, '.')
	n, err := strconv.ParseUint(subject[dot+1:], 36, 64)
	if err != nil || dot < 0 || strconv.FormatUint(n, 36) != subject[dot+1:] { // one text for a number
		return access.ErrToken
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	w := t.from[subject[:dot]]
	if w == nil {
		if !fresh {
			return errAgain
		}
		w = &window{floor: n, last: n}
		t.keepLocked(strings.Clone(subject[:dot]), w)
	}
	t.uses++
	w.used = t.uses
	if n < w.floor && !fresh {
		return errAgain
	}
	if !w.take(n) {
		return errRepeated
	}
	return nil
}

// keepLocked adds a start of a node; the one heard of longest ago makes room.
func (t *taken) keepLocked(prefix string, w *window) {
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

// take notes a number; false if it was taken, or is too far behind to tell.
func (w *window) take(n uint64) bool {
	if n+hopWindow <= w.last {
		return false
	}
	if n > w.last+hopWindow {
		w.last = n - hopWindow
	}
	for w.last < n { // their places were those of numbers that leave the window
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
