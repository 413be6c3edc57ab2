package access

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"fleetd/internal/selector"
)

// holders are administrators whose ids begin with a, ended keys with e, and other keys.
func holders(key string) Holder { return Holder{Admin: key[0] == 'a', Ended: key[0] == 'e'} }

// take takes single places for a key until it gets no more, and returns how many it got.
func take(limit int64, held map[string]int64, key string) (n int64) {
	for Share(limit, held, key, holders) > 0 {
		held[key]++
		n++
	}
	return n
}

func TestShare(t *testing.T) {
	for _, c := range []struct {
		limit int64
		keys  []string
		want  []int64
	}{
		{100, []string{"k1", "k2", "k3", "admin"}, []int64{37, 19, 9, 35}},
		{100, []string{"admin", "k1"}, []int64{100, 0}},
		{4, []string{"k1", "k2", "k3", "admin"}, []int64{1, 1, 0, 2}},
		{30, []string{"k1", "k2", "admin"}, []int64{11, 5, 14}},
		{1_000, []string{"k1", "k1", "admin"}, []int64{375, 0, 625}},
	} {
		held := map[string]int64{}
		for i, key := range c.keys {
			// security: K40
			if got := take(c.limit, held, key); got != c.want[i] {
				t.Errorf("%d places: %s gets %d after %v, want %d", c.limit, key, got, held, c.want[i])
			}
		}
	}
	held := map[string]int64{"ended": 90, "k1": 3}
	if got := take(100, held, "k1"); got != 34 {
		t.Errorf("what an ended key held counts: %d", got)
	}
	if got := Share(100, map[string]int64{"admin": 99}, "k1", holders); got != 1 {
		t.Errorf("one place is left, %d may be taken", got)
	}
	if got := Share(100, map[string]int64{"admin": 200}, "admin", holders); got != 0 {
		t.Errorf("more than the limit is held, %d may be taken", got)
	}
}

// Whatever keys take and give back, administrators have a quarter, and Share permits exactly what the rule says.
func TestShareIsTheRule(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		limit, held := int64(1+random.IntN(120)), map[string]int64{}
		for range 200 {
			key := fmt.Sprint("k", random.IntN(5))
			if random.IntN(3) == 0 {
				held[key] = random.Int64N(held[key] + 1)
			}
			var all int64
			for _, n := range held {
				all += n
			}
			may := Share(limit, held, key, holders)
			for n := int64(1); n <= limit; n++ {
				// held by it + n <= 3/4 of the limit - held by all such keys - n
				// security: K40
				if allowed := 4*(held[key]+n) <= 3*limit-4*(all+n); allowed != (n <= may) {
					t.Fatalf("limit %d, %v: %s may take %d, the rule permits %d: %t", limit, held, key, may, n, allowed)
				}
			}
			if may > 0 {
				held[key] += 1 + random.Int64N(may)
			}
			if admin := Share(limit, held, "admin", holders); 4*admin < limit {
				t.Fatalf("limit %d, %v: administrators have %d", limit, held, admin)
			}
		}
	}
}

func TestHolder(t *testing.T) {
	now := time.Now()
	r := NewRegistry()
	put := func(name string, expires time.Time, scopes ...Scope) string {
		t.Helper()
		k, _, err := NewKey(name, mustScopes(scopes...), selector.Selector{}, nil, now, expires)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := r.Put(k, now); err != nil {
			t.Fatal(err)
		}
		return k.ID
	}
	short, admin := put("short", now.Add(time.Minute), ScopeJobs), put("root", time.Time{}, ScopeAdmin)
	for _, c := range []struct {
		key  string
		at   time.Time
		want Holder
	}{
		{short, now, Holder{}},
		{short, now.Add(time.Hour), Holder{Ended: true}},
		{admin, now, Holder{Admin: true}},
		{KeyAdmin, now, Holder{Admin: true}},
		{KeyOpen, now, Holder{Admin: true}},
		{KeyGateway, now, Holder{}},
		{"unknown2", now, Holder{}},
	} {
		if got := r.Holder(c.key, c.at); got != c.want {
			t.Errorf("%s: %+v, want %+v", c.key, got, c.want)
		}
	}
}
