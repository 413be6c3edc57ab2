package finder

import (
	"cmp"
	"context"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"
)

func all(*Doc) bool       { return true }
func every(*Tool) bool    { return true }
func ids(r Result) string { return idsOf(r.Found) }

// whole are the devices that have all words.
func whole(r Result) []Match {
	return slices.DeleteFunc(r.Found, func(m Match) bool { return len(m.Missing) > 0 })
}

func idsOf(docs []Match) string {
	var list []string
	for _, d := range docs {
		list = append(list, d.ID)
	}
	slices.Sort(list)
	return strings.Join(list, " ")
}

// testIndex is a fleet in which words have several meanings.
func testIndex() *Index {
	x := New()
	x.SetList("lamp", []Tool{{Name: "self.lamp.turn_on", Description: "Turn on the lamp"}, {Name: "self.otto.walk", Description: "执行动作：行走"}, {Name: "self.reboot", Description: "Restart it", UserOnly: true}})
	x.SetList("camera", []Tool{{Name: "self.camera.take_photo", Description: "Takes a photo."}})
	for _, d := range []Doc{
		{ID: "a", Name: "Kitchen lamp", Labels: map[string]string{"room": "kitchen"}, List: "lamp"},
		{ID: "b", Name: "Light", Labels: map[string]string{"location": "kitchen"}, List: "lamp"},
		{ID: "c", Name: "Lamp 2", Labels: map[string]string{"floor": "3"}},
		{ID: "d", Name: "Lamp 3", Labels: map[string]string{"floor": "2"}},
		{ID: "e", Name: "Café-Lampe", Board: "esp-box-3"},
		{ID: "f", Name: "厨房灯", Labels: map[string]string{"room": "厨房"}},
		{ID: "02:f1:ee:00:00:17", Name: "GardenRover17", Labels: map[string]string{"zone": "living-room"}, List: "camera"},
		{ID: "h", Name: "Lab of the east", Labels: map[string]string{"zone": "lab"}},
	} {
		x.Put(d)
	}
	return x
}

func TestFind(t *testing.T) {
	x := testIndex()
	for query, want := range map[string]string{
		"kitchen lamp":             "a",
		"LAMPS, kitchen":           "a",
		"the lamp in the kitchen!": "a",
		"kichen lamp":              "a",
		"kitchenlamp":              "a",
		"kitchen":                  "a b",
		"floor 2":                  "d",
		"lamp on the 2nd floor":    "d",
		"second floor":             "d",
		"floor=3":                  "c",
		"lamp 2":                   "c d", // one of that name, and one on that floor: the caller must choose
		"lamp 02":                  "c d",
		"lamp 4":                   "",
		"lamp four":                "",
		"rover seventeen":          "",
		"the lamp two":             "c d",
		"floor three":              "c",
		"two lamps in the kitchen": "a",
		"cafe lampe":               "e",
		"CAFÉ":                     "e",
		"esp box":                  "e",
		"厨房的灯":                     "f",
		"把厨房的灯打开":                  "f",
		"浴室的灯":                     "",
		"garden rover 17":          "02:f1:ee:00:00:17",
		"gardenrover17":            "02:f1:ee:00:00:17",
		"00:00:17":                 "02:f1:ee:00:00:17",
		"02F1EE000017":             "02:f1:ee:00:00:17",
		"camera":                   "02:f1:ee:00:00:17",
		"livingroom camera":        "02:f1:ee:00:00:17",
		"photo kitchen":            "a b", // a word that only tools have is not required
		"kitchen rover":            "",
		"lamp in the garage":       "",
		"行走":                       "a b",
		"lab":                      "h",
		"the lab of the east":      "h",
		"zone":                     "02:f1:ee:00:00:17 h",
	} {
		if got := idsOf(whole(find(x, Search{Text: query, See: all, May: every}))); got != want {
			t.Errorf("%s: %q, want %q", query, got, want)
		}
	}
	if r := find(x, Search{Text: "the lamp 2", See: all, May: every}); len(r.Found) != 2 || r.Found[0].ID != "c" {
		t.Errorf("the device of that very name does not come first: %+v", r)
	}
	r := find(x, Search{Text: "kitchen garage lamp", See: all, May: every})
	if !slices.Equal(r.Unknown, []string{"garage"}) || ids(r) != "a" || !slices.Equal(r.Found[0].Missing, []string{"garage"}) || r.Found[0].Exact {
		t.Errorf("%+v", r)
	}
	if r = find(x, Search{Text: "rover in the kitchén", See: all, May: every}); ids(r) != "02:f1:ee:00:00:17 a b" || !slices.Equal(r.Found[0].Missing, []string{"kitchén"}) || !slices.Equal(r.Found[1].Missing, []string{"rover"}) {
		t.Errorf("%+v", r)
	}
	if r = find(x, Search{Text: "kichen lamp", See: all, May: every}); r.ReadAs["kichen"] != "kitchen" || r.Weaker != 1 {
		t.Errorf("%+v", r)
	}
}

// What people write in other languages, half words, and what the devices are to do.
func TestFindMore(t *testing.T) {
	x := New()
	x.SetList("lamp", []Tool{{Name: "self.lamp.turn_on"}, {Name: "self.lamp.turn_off"}})
	x.SetList("speaker", []Tool{{Name: "self.audio_speaker.set_volume", Description: "Set the volume of the speaker"}})
	x.SetList("robot", []Tool{{Name: "self.robot.stop"}})
	for i := range 26 {
		x.Put(Doc{ID: fmt.Sprintf("c%02d", i), Name: fmt.Sprintf("Panel %d", i), Labels: map[string]string{"type": "classroom"}})
	}
	for _, d := range []Doc{
		{ID: "n1", Name: "Classroom 3 panel"}, {ID: "k1", Labels: map[string]string{"classroom": "7"}},
		{ID: "g1", Name: "Küche Lampe", List: "lamp"}, {ID: "g2", Name: "Küche Lautsprecher", List: "speaker"},
		{ID: "f1", Name: "Entrée caméra"}, {ID: "s1", Name: "Lámpara del jardín", List: "lamp"}, {ID: "r1", Name: "Cart 1", List: "robot"},
	} {
		x.Put(d)
	}
	for _, c := range []struct{ text, do, want string }{
		{"die Lampe in der Küche", "", "g1"},
		{"la caméra de l'entrée", "", "f1"},
		{"la lámpara del jardín", "", "s1"},
		{"die Küchenlampe", "", "g1"},
		{"Küche", "turn off", "g1"},
		{"in der Küche", "set the volume to 30", "g2"},
		{"Küche", "dance", "g1 g2"}, // nobody can
		{"cart", "stop", "r1"},
		{"car", "", ""},       // three letters are part of too many words
		{"lamp", "", "g1 s1"}, // by their tools
		{"offline", "", ""},
	} {
		if got := idsOf(whole(find(x, Search{Text: c.text, Do: c.do, See: all, May: every}))); got != c.want {
			t.Errorf("%s, %s: %q, want %q", c.text, c.do, got, c.want)
		}
	}
	if found := whole(find(x, Search{Text: "classrooms", See: all, May: every})); len(found) != 28 {
		t.Errorf("%d classrooms, by name, label and key", len(found))
	}
	if r := find(x, Search{Text: "Küche", Do: "turn on", See: all, May: every}); r.Unable != 1 {
		t.Errorf("%+v", r)
	}
	if r := find(x, Search{Text: "panel volume", See: all, May: every}); !slices.Equal(r.OfTools, []string{"volume"}) {
		t.Errorf("%+v", r)
	}
	if r := find(x, Search{Text: "KÜCHE LAMPE", See: all, May: every}); len(r.Found) != 1 || !r.Found[0].Exact {
		t.Errorf("%+v", r)
	}
	r := find(x, Search{Text: "lampe im Wohnzimmer der Großmutter", See: all, May: every})
	if !slices.Equal(r.Unknown, []string{"Wohnzimmer", "Großmutter"}) || ids(r) != "g1" || !slices.Equal(r.Found[0].Missing, r.Unknown) {
		t.Errorf("%+v", r)
	}
	x.SetList("desk", []Tool{{Name: "self.desk_light.turn_on"}})
	x.Put(Doc{ID: "o1", Name: "Office desk", List: "desk"})
	if r := find(x, Search{Text: "Küche", Do: "turn on the desk light", See: all, May: every}); ids(r) != "g1" || r.Unable != 1 {
		t.Errorf("a tool of another room counts: %+v", r)
	}
	x.Put(Doc{ID: "e1", Name: "Dock 01"})
	if r := find(x, Search{Text: "dock 1", See: all, May: every}); len(r.Found) != 1 || !r.Found[0].Exact {
		t.Errorf("%+v", r)
	}
	if r := find(x, Search{Text: "panel volume", See: all, May: every}); r.Weaker != 0 {
		t.Errorf("%+v", r)
	}
	if r := find(x, Search{Text: "which devices are there", See: all, May: every}); !r.Blank {
		t.Errorf("%+v", r)
	}
}

func TestCompareNames(t *testing.T) {
	names := []string{"", "Dock", "Dock 1", "Dock 02", "Dock 3 b", "Dock 10", "Dock 10 a", "Eingang", "dock 1", "Ä 2"}
	for i := range names {
		for j := range names {
			if got, want := compareNames(names[i], names[j]), cmp.Compare(i, j); cmp.Compare(got, 0) != want {
				t.Errorf("%q and %q: %d, want %d", names[i], names[j], got, want)
			}
		}
	}
}

// Words of devices and tools that are not for the caller do not exist for it.
func TestFindForSome(t *testing.T) {
	x := testIndex()
	see := func(d *Doc) bool { return d.ID != "a" && d.ID != "b" }
	// security: H11
	if r := find(x, Search{Text: "kichen", See: see, May: every}); len(r.Found) > 0 || len(r.ReadAs) > 0 || !slices.Equal(r.Unknown, []string{"kichen"}) {
		t.Errorf("%+v", r)
	}
	// security: H11
	if r := find(x, Search{Text: "restart", See: all, May: func(t *Tool) bool { return !t.UserOnly }}); len(r.Found) > 0 || !slices.Equal(r.Unknown, []string{"restart"}) {
		t.Errorf("%+v", r)
	}
	labels, total := x.Labels(see, 10, 1)
	// security: H11
	if total != 6 || slices.ContainsFunc(labels, func(l Label) bool { return slices.Contains(l.Values, "kitchen") }) {
		t.Errorf("%+v of %d", labels, total)
	}
	// security: H11
	if ids := idsOf(x.Named("kitchen LAMP", see)); ids != "" {
		t.Errorf("%q", ids)
	}
	if ids := idsOf(x.Named("kitchen-LAMP", all)); ids != "a" {
		t.Errorf("%q", ids)
	}
}

// An index that is changed again and again finds what one finds that was made of the
// last state.
func TestChanges(t *testing.T) {
	x := New()
	x.SetList("l", []Tool{{Name: "self.x", Description: "waves"}})
	for i := range 6000 {
		x.Put(Doc{ID: fmt.Sprintf("d%d", i%50), Name: fmt.Sprintf("thing %d", i), List: "l"})
	}
	x.Remove("d49")
	if x.Len() != 49 || len(x.slots) > 3000 {
		t.Errorf("%d devices in %d places", x.Len(), len(x.slots))
	}
	for query, want := range map[string]int{"thing 5950": 1, "thing 5999": 0, "thing 117": 0, "waves": 49} {
		if found := whole(find(x, Search{Text: query, See: all, May: every})); len(found) != want {
			t.Errorf("%s: %d", query, len(found))
		}
	}
}

func TestNear(t *testing.T) {
	for pair, want := range map[string]bool{"kitchen kichen": true, "kitchen kitcehn": true, "kitchen kitten": false, "lamp lamb": true, "ab ba": true, "abc": false} {
		a, b, _ := strings.Cut(pair, " ")
		if near(a, b, 1) != want {
			t.Errorf("%s: %v", pair, !want)
		}
	}
}

func TestNearest(t *testing.T) {
	names := []string{"self.audio_speaker.set_volume", "self.screen.set_brightness", "self.reboot"}
	for name, want := range map[string]string{"set_volume": names[0], "self.screen.set_brightnes": names[1], "volume": names[0], "brightness.set": names[1], "teapot": ""} {
		if got := strings.Join(Nearest(name, names, 1), ""); got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
}

func FuzzFind(f *testing.F) {
	x := testIndex()
	for _, seed := range []string{"kitchen lamp", "厨房的灯", "2nd floor", "a=b", "00:17", "\xff", "ʼs İ ß"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, query string) {
		for _, d := range find(x, Search{Text: query, See: all, May: every}).Found {
			if !slices.ContainsFunc(x.slots, func(s slot) bool { return s.doc == d.Doc }) {
				t.Errorf("%q", d.ID)
			}
		}
		Rank(query)("self.x", query)
	})
}

// many is a fleet of 10,000.
func many(n int) *Index {
	x := New()
	x.SetList("lamp", []Tool{{Name: "self.lamp.turn_on", Description: "Turn on the lamp"}})
	for i := range n {
		x.Put(Doc{ID: fmt.Sprintf("02:e7:00:%02x:%02x:%02x", i>>16, i>>8&255, i&255), Name: fmt.Sprintf("%s %04d", []string{"Lamp", "Speaker", "Panel"}[i%3], i),
			Labels: map[string]string{"tower": []string{"south", "north"}[i%2], "level": fmt.Sprint(i % 40), "suite": fmt.Sprint(i)}, List: "lamp"})
	}
	return x
}

// BenchmarkFind is a search in 10,000 devices, and one with a slip.
func BenchmarkFind(b *testing.B) {
	x := many(10_000)
	for _, query := range []string{"lamp suite 1233", "lamp north level 7", "speeker nroth level 7", "nothing of this"} {
		b.Run(query, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				find(x, Search{Text: query, See: all, May: every})
			}
		})
	}
}

// The index takes about as much memory as its bound assumes.
func TestMemory(t *testing.T) {
	const n, most = 20_000, 2000 // bytes of a device
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	x := many(n)
	runtime.GC()
	runtime.ReadMemStats(&after)
	if each := int(after.HeapAlloc-before.HeapAlloc) / n; each > most {
		t.Errorf("%d bytes a device, at most %d may be", each, most)
	} else {
		t.Logf("%d bytes a device", each)
	}
	runtime.KeepAlive(x)
}

// find is Find with a context that does not end.
func find(x *Index, q Search) Result {
	r, err := x.Find(context.Background(), q)
	if err != nil {
		panic(err)
	}
	return r
}
