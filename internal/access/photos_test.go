package access

import (
	"encoding/json"
	"testing"
	"time"

	"fleetd/internal/selector"
)

// A key from before the scope photos:read keeps photos through devices:read; a later one needs
// the scope.
func TestOldKeysKeepPhotos(t *testing.T) {
	for _, tc := range []struct {
		document string
		want     bool
	}{
		{`{"id":"aaaaaaaa","name":"old","scopes":["devices:read"]}`, true},
		{`{"id":"aaaaaaaa","name":"old","scopes":["events:read"]}`, false},
		{`{"id":"aaaaaaaa","name":"new","scopes":["devices:read"],"since":1}`, false},
		{`{"id":"aaaaaaaa","name":"new","scopes":["devices:read","photos:read"],"since":1}`, true},
	} {
		var k Key
		if err := json.Unmarshal([]byte(tc.document), &k); err != nil || k.Scopes.Has(ScopePhotos) != tc.want {
			t.Errorf("%s: %v, %v", tc.document, k.Scopes.Names(), err)
		}
	}
	scopes, err := ParseScopes([]string{"devices:read"})
	if err != nil {
		t.Fatal(err)
	}
	k, _, err := NewKey("new", scopes, selector.Selector{}, nil, time.Now(), time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(k)
	if err != nil {
		t.Fatal(err)
	}
	var again Key
	if err := json.Unmarshal(text, &again); err != nil || again.Scopes.Has(ScopePhotos) {
		t.Errorf("%s: %v, %v", text, again.Scopes.Names(), err)
	}
}
