package devices

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"slices"
)

// ClientKey keys the hashes by which clients are shown. A Client-Id itself is a secret: the
// OTA check gives the device's credentials to whoever presents it. The key is made once for
// each database and never changes, so that a client keeps its hash.
type ClientKey string

// Hash returns the first 12 hex digits of the hash of a Client-Id; empty if that or the key is.
func (k ClientKey) Hash(clientID string) string {
	if k == "" || clientID == "" {
		return ""
	}
	mac := hmac.New(sha256.New, []byte(k))
	mac.Write([]byte(clientID)) // never fails (hash.Hash)
	return hex.EncodeToString(mac.Sum(nil)[:6])
}

// Refused are the refused clients of a device, oldest first: a JSON array of their
// Client-Ids, so that one can be approved; empty if there are none.
type Refused string

const maxRefused = 32 // of one device; the newest ones are kept

// List returns the Client-Ids.
func (r Refused) List() []string {
	clients := []string{}
	_ = json.Unmarshal([]byte(r), &clients) // it is empty, or was made by newRefused
	return clients
}

// Has reports whether a client is refused.
func (r Refused) Has(clientID string) bool { return r != "" && slices.Contains(r.List(), clientID) }

// With returns the list with a client at its end.
func (r Refused) With(clientID string) Refused {
	list := append(r.Without(clientID).List(), clientID)
	return newRefused(list[max(0, len(list)-maxRefused):])
}

// Without returns the list without a client.
func (r Refused) Without(clientID string) Refused {
	return newRefused(slices.DeleteFunc(r.List(), func(c string) bool { return c == clientID }))
}

func newRefused(list []string) Refused {
	if len(list) == 0 {
		return ""
	}
	return Refused(value(list))
}
