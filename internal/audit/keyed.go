package audit

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"hash"
	"strconv"
	"strings"
	"time"
)

// A chain of plain hashes shows what was changed by accident, and nothing that
// somebody changed who can write rows: he computes the rest anew. Blocks are
// therefore hashed under a key of the fleet's secret. Those of older versions
// are not, and a forger could take keyed runs out and put others in that are not
// keyed; so the name of every keyed run, which its hashes cover, says since when
// the fleet writes with its key, and what is later and not keyed is a fault. A
// single keyed block suffices for that, whoever kept it.
const (
	keyedMark = "k" // in front of the time; names of other runs have no dash
	// KeyedGrace is how long after the first keyed run others may still begin:
	// until the last node is upgraded.
	KeyedGrace = 24 * time.Hour
)

// newRun names a run; keyed since a time, unless that is zero.
func newRun(since time.Time) string {
	name := strings.ToLower(rand.Text()[:16])
	if since.IsZero() {
		return name
	}
	return keyedMark + strconv.FormatInt(since.Unix(), 36) + "-" + name
}

// keyedSince is the time in the name of a keyed run.
func keyedSince(run string) (since time.Time, keyed bool) {
	mark, _, found := strings.Cut(run, "-")
	if !found || !strings.HasPrefix(mark, keyedMark) {
		return since, false
	}
	seconds, err := strconv.ParseInt(mark[len(keyedMark):], 36, 64)
	return time.Unix(seconds, 0).UTC(), err == nil
}

// digest is what the blocks of a run are hashed with.
func digest(run string, key []byte) hash.Hash {
	if _, keyed := keyedSince(run); keyed {
		return hmac.New(sha256.New, key)
	}
	return sha256.New()
}
