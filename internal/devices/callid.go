package devices

import (
	"crypto/sha256"
	"encoding/binary"
	"math/rand/v2"
	"sync/atomic"
	"time"
)

// CallIDs creates the ids of calls, raw requests and messages on the node that first
// receives them: 16 characters of a-z and 2-7 (base32 of RFC 4648). The first 3
// derive from the node's name, the next 4 from its start time, the rest from a counter,
// scrambled so that it does not reveal how many calls others make. It is safe for
// concurrent use.
type CallIDs struct {
	prefix [7]byte
	keys   [3]uint64 // odd, random
	last   atomic.Uint64
}

// callIDLength is the length of an id in characters.
const callIDLength = 16

// NewCallIDs returns the id generator of one process.
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

// Next returns a new id.
func (c *CallIDs) Next() string {
	var id [callIDLength]byte
	copy(id[:], c.prefix[:])
	const bits = 5 * (callIDLength - len(c.prefix))
	n := c.last.Add(1)
	for _, key := range c.keys { // each step is reversible, so different numbers give different ids
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

// WithCallID returns err as an Error of the call with this id.
func WithCallID(err error, id string) error {
	if err == nil {
		return nil
	}
	e := *AsError(err) // copied, since other calls may share it
	e.Call = id
	return &e
}
