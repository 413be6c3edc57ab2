package audit

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"time"
)

// Hash is a SHA-256: of a block, or of arguments.
type Hash [sha256.Size]byte

// String is the hash in hex; empty for the one before the first block.
func (h Hash) String() string {
	if h == (Hash{}) {
		return ""
	}
	return hex.EncodeToString(h[:])
}

// MarshalText writes what String does.
func (h Hash) MarshalText() ([]byte, error) { return []byte(h.String()), nil }

// UnmarshalText reads what String writes.
func (h *Hash) UnmarshalText(text []byte) (err error) {
	*h, err = ParseHash(string(text))
	return err
}

// ParseHash is the opposite of String.
func ParseHash(text string) (h Hash, err error) {
	if text == "" {
		return h, nil
	}
	b, err := hex.DecodeString(text)
	if err != nil || len(b) != len(h) {
		return h, fmt.Errorf("%.80q is no hash of a block", text)
	}
	copy(h[:], b)
	return h, nil
}

// Block is a group of entries as it is stored: one row, for a row per entry
// would cost more than the call that it is about.
type Block struct {
	Run               string // one start of one node
	Node              string
	FirstSeq, LastSeq int64     // of the run, from 1
	FirstAt, LastAt   time.Time // the range of what the entries say
	Entries           []byte    // a line of JSON each
	Previous, Hash    Hash
}

// Sum is what the block's hash has to be: under the key, if it is of a keyed run.
// It covers the block before, and all that is stored.
func (b *Block) Sum(key []byte) (h Hash) {
	digest := digest(b.Run, key)
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
	Before       Place // only blocks at or behind this one, newest first
	Limit        int   // blocks
}

// Place is where a block stands in the order of time, and an entry in it.
type Place struct {
	LastAt   time.Time
	Run      string
	FirstSeq int64
	Seq      int64 // entries below it are still to come; 0: all
}
