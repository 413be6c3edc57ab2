package audit

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"time"
)

// Hash is a SHA-256 of a block or of arguments.
type Hash [sha256.Size]byte

// String returns the hash in hex; empty for the zero hash.
func (h Hash) String() string {
	if h == (Hash{}) {
		return ""
	}
	return hex.EncodeToString(h[:])
}

// MarshalText encodes like String.
func (h Hash) MarshalText() ([]byte, error) { return []byte(h.String()), nil }

// UnmarshalText decodes the result of String.
func (h *Hash) UnmarshalText(text []byte) (err error) {
	*h, err = ParseHash(string(text))
	return err
}

// ParseHash is the inverse of String.
func ParseHash(text string) (h Hash, err error) {
	if text == "" {
		return h, nil
	}
	b, err := hex.DecodeString(text)
	if err != nil || len(b) != len(h) {
		return h, fmt.Errorf("%.80q is not the hash of a block", text)
	}
	copy(h[:], b)
	return h, nil
}

// Block is a group of entries as stored, in one row: a row for each entry would cost more than the
// recorded call.
type Block struct {
	Run               string // one process of one node
	Node              string
	FirstSeq, LastSeq int64     // of the run, from 1
	FirstAt, LastAt   time.Time // the range of the entries' times
	Entries           []byte    // a line of JSON for each
	Previous, Hash    Hash
}

// Sum returns the correct hash of the block, which covers the previous block's hash and all fields. The key derives from the fleet's
// secret: an attacker with access to the database could recompute a plain hash.
func (b *Block) Sum(key []byte) (h Hash) {
	digest := hmac.New(sha256.New, key)
	digest.Write(b.Previous[:])
	fmt.Fprintf(digest, "%q %q %d %d %d %d\n", b.Run, b.Node, b.FirstSeq, b.LastSeq, b.FirstAt.UnixMicro(), b.LastAt.UnixMicro())
	digest.Write(b.Entries)
	digest.Sum(h[:0])
	return h
}

// Query selects blocks. Zero fields select everything.
type Query struct {
	Since, Until time.Time
	Run          string
	Before       Place // only this block and older ones
	Limit        int   // blocks
}

// Place is the position of a block in the order of time, and of an entry in it.
type Place struct {
	LastAt   time.Time
	Run      string
	FirstSeq int64
	Seq      int64 // only entries below this number; 0: all
}
