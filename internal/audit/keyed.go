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

// A chain of plain hashes reveals accidental changes, but not those of an attacker with access to the
// database, who can recompute the hashes. Blocks are therefore hashed with a key that derives from the
// fleet's secret. Blocks of older versions are not keyed, so an attacker could replace keyed runs by
// others without a key. The name of every keyed run, which its hashes cover, therefore contains the time
// since when the fleet uses its key; later blocks without a key are faults. A single remaining keyed
// block is sufficient for that.
const (
	keyedMark = "k" // before the time; names of other runs contain no dash
	// KeyedGrace is how long after the first keyed run others may still start without a key: until
	// the last node is upgraded.
	KeyedGrace = 24 * time.Hour
)

// newRun returns a name for a run; keyed since a time, unless that is zero.
func newRun(since time.Time) string {
	name := strings.ToLower(rand.Text()[:16])
	if since.IsZero() {
		return name
	}
	return keyedMark + strconv.FormatInt(since.Unix(), 36) + "-" + name
}

// keyedSince returns the time in the name of a keyed run.
func keyedSince(run string) (since time.Time, keyed bool) {
	mark, _, found := strings.Cut(run, "-")
	if !found || !strings.HasPrefix(mark, keyedMark) {
		return since, false
	}
	seconds, err := strconv.ParseInt(mark[len(keyedMark):], 36, 64)
	return time.Unix(seconds, 0).UTC(), err == nil
}

// digest returns the hash function of the blocks of a run.
func digest(run string, key []byte) hash.Hash {
	if _, keyed := keyedSince(run); keyed {
		return hmac.New(sha256.New, key)
	}
	return sha256.New()
}
