package devices

import (
	"crypto/sha256"
	"encoding/binary"
	"math/rand/v2"
	"sync/atomic"
	"time"
)

// CallIDs makes the ids of calls, raw requests and messages where they come into
// the fleet: 16 of a-z and 2-7 (base32 of RFC 4648). The first 3 are of the node's
// name, the next 4 of its start, the rest are a number that comes once and does not
// tell its receiver how many calls others make. It is safe for concurrent use.
type CallIDs struct {
	prefix [7]byte
	keys   [3]uint64 // odd, random
	last   atomic.Uint64
}

// callIDLength is how many characters an id has.
const callIDLength = 16

// NewCallIDs makes the ids of one start of a node.
func NewCallIDs(node string, started time.Time) *CallIDs {
	c := &CallIDs{}
	sum := sha256.Sum256([]byte(node))
	base32(c.prefix[:3], uint64(binary.BigEndian.Uint32(sum[:])))
	base32(c.prefix[3:], uint64(started.UnixMilli()/100))
	for i := range c.keys {
		c.keys[i] = rand.Uint64() | 1
	}
	return c
}

// Next returns an id that was not given before.
func (c *CallIDs) Next() string {
	var id [callIDLength]byte
	copy(id[:], c.prefix[:])
	const bits = 5 * (callIDLength - len(c.prefix))
	n := c.last.Add(1)
	for _, key := range c.keys { // each step can be undone, so that two numbers stay two
		n = n * key & (1<<bits - 1)
		n ^= n >> (bits/2 + 1)
	}
	base32(id[len(c.prefix):], n)
	return string(id[:])
}

// base32 fills dst with the low bits of n.
func base32(dst []byte, n uint64) {
	for i := len(dst) - 1; i >= 0; i-- {
		dst[i] = "abcdefghijklmnopqrstuvwxyz234567"[n&31]
		n >>= 5
	}
}

// OfCall is err as the error of a call with this id.
func OfCall(err error, id string) error {
	if err == nil {
		return nil
	}
	e := *AsError(err) // others may hold the same
	e.Call = id
	return &e
}
