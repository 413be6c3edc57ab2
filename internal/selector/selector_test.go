package selector

import (
	"encoding/json"
	"errors"
	"math/rand/v2"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

var now = time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC)

func parse(t testing.TB, text string) Selector {
	t.Helper()
	s, err := Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func tools(names ...string) func(func(string) bool) bool {
	return func(match func(string) bool) bool { return slices.ContainsFunc(names, match) }
}

// lamp is online, shelf is offline, and of blank nothing is known but its id.
func lamp() *Device {
	return &Device{ID: "02:00:00:00:00:0a", Name: "Lamp, left", Board: "bread-compact-wifi", Chip: "esp32s3", Firmware: "2.4.2", ELF: "abcd",
		State: "online", Online: true, Transport: "websocket", Node: "n1", Reason: "gone", LastSeen: now.Add(-100 * 24 * time.Hour),
		Labels:  map[string]string{"room": "lab", "board": "green", "empty": "", "Floor_1-a": "1*", "in": "yes", "label": "l"},
		HasTool: tools("self.lamp.on", "self.lamp.off")}
}

func shelf() *Device {
	return &Device{ID: "shelf", State: "offline", Transport: "mqtt", Node: "n2", Reason: "node_lost", LastSeen: now.Add(-3 * time.Hour), Firmware: "v2.5"}
}

func blank() *Device { return &Device{ID: "blank", State: "pending"} }

// A relative time counts from the time of At, however much later the selector is evaluated.
func TestAt(t *testing.T) {
	for text, want := range map[string]bool{"seen>4h": false, "seen<4h": true, "seen>2h": true} { // shelf was seen 3 h before now
		s := And(parse(t, "!room"), parse(t, text).At(now))
		if got := s.Match(shelf(), now.Add(2*time.Hour)); got != want {
			t.Errorf("%s: %t", text, got)
		}
	}
}

// Every operator on every field: the devices that the text selects.
func TestMatch(t *testing.T) {
	for text, want := range map[string]string{
		"": "lamp shelf blank", " \t\n": "lamp shelf blank",

		"device=02:00:00:00:00:0A": "lamp", "device=02000000000A": "lamp", "device=02-00-00-00-00-0a": "lamp", "device!=SHELF": "lamp blank",
		"device in (shelf,02000000000a)": "lamp shelf", "device not in (shelf,lamp)": "lamp blank", "device=02:*": "lamp", "device=S*": "shelf",
		"device=02:00-00:00-00:0a": "", "device": "lamp shelf blank", "!device": "",

		"room=lab": "lamp", "room=Lab": "", "room!=lab": "shelf blank", "room=l*": "lamp", "room=*b": "lamp", "room=*": "lamp", "room=l*a*b": "lamp", "room=la*ab": "",
		"room!=k*": "lamp shelf blank", "room in (kitchen, lab)": "lamp", "room in (k*,l*)": "lamp", "room not in (kitchen,hall)": "lamp shelf blank",
		"room notin (lab)": "shelf blank", "room": "lamp", "!room": "shelf blank", "! room": "shelf blank", "Room": "",
		"empty": "lamp", `empty=""`: "lamp", `empty!=""`: "shelf blank", `room=""`: "", "empty=*": "lamp",
		"board=green": "", "label.board=green": "lamp", "label.board": "lamp", "!label.board": "shelf blank", "label.room=lab": "lamp",
		"label=l": "lamp", "label.label=l": "lamp", "in=yes": "lamp", "in in (yes)": "lamp", "not in (x)": "", "!not": "lamp shelf blank",
		`Floor_1-a="1*"`: "lamp", `Floor_1-a="1\*"`: "lamp", `Floor_1-a="1\*2"`: "", `room="l\*"`: "", `room="l*"`: "lamp", `room="\x6cab"`: "lamp",

		`name="Lamp, left"`: "lamp", "name=Lamp*": "lamp", "name=lamp*": "", `name!="Lamp, left"`: "shelf blank", `name in ("Lamp, left")`: "lamp",
		`name not in (a)`: "lamp shelf blank", "name": "lamp", "!name": "shelf blank", `name=""`: "",
		"board=bread-*": "lamp", "board!=x": "lamp shelf blank", "board in (bread-compact-wifi)": "lamp", "board not in (bread*)": "shelf blank", "board": "lamp", "!board": "shelf blank",
		"chip=esp32s3": "lamp", "chip!=esp32s3": "shelf blank", "chip in (esp32)": "", "chip not in (esp32)": "lamp shelf blank", "chip": "lamp", "!chip": "shelf blank",
		"elf=abcd": "lamp", "elf=ab*": "lamp", "elf!=abcd": "shelf blank", "elf in (abcd,ef)": "lamp", "elf not in (abcd,ef)": "shelf blank", "elf": "lamp", "!elf": "shelf blank",

		"firmware=2.4.2": "lamp", "firmware=2.4": "", "firmware=2.*": "lamp", "firmware!=2.4.2": "shelf blank", "firmware in (2.4.2,v2.5)": "lamp shelf",
		"firmware not in (2.4.2)": "shelf blank", "firmware": "lamp shelf", "!firmware": "blank",
		"firmware<2.4.2": "", "firmware<=2.4.2": "lamp", "firmware>2.4.2": "", "firmware>=2.4.2": "lamp", "firmware<2.10": "lamp", "firmware>2.4": "lamp",
		"firmware<99": "lamp", "firmware>0": "lamp", "firmware <= 2.4.2-rc1": "lamp", "firmware>2,firmware<3": "lamp", `firmware<"3 beta"`: "lamp",

		"state=online": "lamp", "state!=online": "shelf blank", "state in (offline,pending)": "shelf blank", "state not in (online, contested)": "shelf blank",
		"state": "lamp shelf blank", "!state": "", "state=contested": "",
		"transport=websocket": "lamp", "transport=mqtt": "", "transport!=mqtt": "lamp shelf blank", "transport in (mqtt,websocket)": "lamp",
		"transport not in (websocket)": "shelf blank", "transport": "lamp", "!transport": "shelf blank",
		"node=n1": "lamp", "node=n*": "lamp", "node!=n2": "lamp shelf blank", "node in (n1,n2)": "lamp", "node not in (n1,n2)": "shelf blank", "node": "lamp", "!node": "shelf blank",
		"reason=node_lost": "shelf", "reason=gone": "", "reason!=gone": "lamp shelf blank", "reason in (gone,node_lost)": "shelf", "reason not in (node_lost)": "lamp blank",
		"reason": "shelf", "!reason": "lamp blank",

		"seen": "lamp shelf", "!seen": "blank", "seen>2h": "shelf", "seen<2h": "lamp", "seen>3h": "", "seen<3h": "lamp", "seen<1d": "lamp shelf", "seen>0s": "shelf",
		"seen > 2h59m59s": "shelf", "seen<1d12h": "lamp shelf", "seen<0s": "",

		"tool=self.lamp.on": "lamp", "tool=self.lamp.*": "lamp", "tool=self.dog.*": "", "tool!=self.lamp.on": "shelf blank", "tool!=self.dog.*": "lamp shelf blank",
		"tool in (a,self.lamp.off)": "lamp", "tool not in (a,self.lamp.off)": "shelf blank", "tool": "lamp", "!tool": "shelf blank",

		"room=lab, state=online ,!retired": "lamp", "room=lab,state=offline": "", "room=lab,room=kitchen": "", "room!=a,room!=b": "lamp shelf blank",
	} {
		s, err := Parse(text)
		if err != nil {
			t.Errorf("%q: %v", text, err)
			continue
		}
		var got []string
		for _, d := range []struct {
			name   string
			device *Device
		}{{"lamp", lamp()}, {"shelf", shelf()}, {"blank", blank()}} {
			if s.Match(d.device, now) {
				got = append(got, d.name)
			}
		}
		if got := strings.Join(got, " "); got != want {
			t.Errorf("%q selects %q, want %q", text, got, want)
		}
		again, err := Parse(s.String())
		if err != nil || !reflect.DeepEqual(texts(s), texts(again)) {
			t.Errorf("%q is written %q, which is %q, %v", text, s, again, err)
		}
	}
}

func texts(s Selector) (out []string) {
	for _, t := range s.Terms() {
		t.tool = nil
		out = append(out, strconv.Itoa(int(t.Field))+t.String())
	}
	return out
}

func TestCanonicalText(t *testing.T) {
	for text, want := range map[string]string{
		"":                                 "",
		" state = online , room = lab ":    "room=lab,state=online",
		"room in (b , a,b)":                "room in (a,b)",
		"room in ( lab )":                  "room=lab",
		"room not  in(b,a)":                "room not in (a,b)",
		"room notin(a)":                    "room!=a",
		"label.room=lab,room=lab":          "room=lab",
		"label.board=x":                    "label.board=x",
		"device=AABBCCDDEEFF":              "device=aa:bb:cc:dd:ee:ff",
		"device=AA-BB-*":                   "device=aa-bb-*",
		`room="lab"`:                       "room=lab",
		`name="a b*"`:                      `name="a b*"`,
		`name="a\*"`:                       `name="a\*"`,
		`name=a**b`:                        `name=a*b`,
		`name="<a"`:                        `name="<a"`,
		`name="a<"`:                        `name=a<`,
		`name=""`:                          `name=""`,
		"name=\"\x7f\u200b\"":              `name="\x7f\xe2\x80\x8b"`,
		`name="\xff"`:                      `name="\xff"`,
		`name=小灯`:                          `name=小灯`,
		`name="\"\\"`:                      `name="\"\\"`,
		"seen>48h":                         "seen>2d",
		"seen>36h":                         "seen>1d12h",
		"seen<90s":                         "seen<1m30s",
		"seen<2h0m":                        "seen<2h",
		"seen<120m":                        "seen<2h",
		"seen<0s":                          "seen<0s",
		`firmware>="2.4.2"`:                "firmware>=2.4.2",
		"tool=a,seen>1h,!x,device=d,b,x=1": "device=d,b,!x,x=1,seen>1h,tool=a",
	} {
		if s, err := Parse(text); err != nil || s.String() != want {
			t.Errorf("%q is written %q, want %q, %v", text, s, want, err)
		}
	}
}

func TestSyntaxErrors(t *testing.T) {
	many := func(n int, text, sep string) string {
		return strings.TrimSuffix(strings.Repeat(text+sep, n), sep)
	}
	for text, want := range map[string]struct {
		column   int
		expected string
	}{
		",":                                  {1, "a field (device, "},
		"room=lab,":                          {10, "a field (device, "},
		"room=lab,,a=b":                      {10, "a field"},
		"=lab":                               {1, "a field"},
		"!":                                  {2, "a field"},
		"!!room":                             {2, "a field"},
		"room=":                              {6, "a value"},
		"room= ,a=b":                         {7, "a value"},
		"room==lab":                          {6, "a value"},
		"room=>lab":                          {6, "a value"},
		"room=(lab)":                         {6, "a value"},
		"room lab":                           {6, "an operator (=, !=, in, not in)"},
		"room.floor=1":                       {5, "an operator"},
		"小灯=1":                               {1, "a field"},
		"room=小灯 x":                          {9, `"," or the end`},
		"room=a b":                           {8, `"," or the end; a value with a space`},
		`room=a"b"`:                          {7, `"," or the end`},
		`room="a"b`:                          {9, `"," or the end`},
		`room="a`:                            {8, `a closing "`},
		`room="a\n"`:                         {8, `\", \\, \* or \x and two hex digits`},
		`room="a\x6"`:                        {8, `\", \\, \*`},
		`room="a\`:                           {8, `\", \\, \*`},
		`room=a\*`:                           {7, `"," or the end`},
		"!room=lab":                          {6, `"," or the end after !room`},
		"room in a":                          {9, `"(" and a list of values`},
		"room in":                            {8, `"(" and a list of values`},
		"room in ()":                         {10, "a value"},
		"room in (a":                         {11, `"," or ")"`},
		"room in (a,)":                       {12, "a value"},
		"room in (a b)":                      {12, `"," or ")"`},
		"room in (a))":                       {12, `"," or the end`},
		"room not (a)":                       {6, "an operator"},
		"room<2":                             {5, "one of =, !=, in, not in after room; only firmware and seen"},
		"label.board>=2":                     {12, "one of =, !=, in, not in after label.board"},
		"device<a":                           {7, "one of =, !="},
		"tool>=a":                            {5, "one of =, !="},
		"name > a":                           {6, "one of =, !="},
		"seen=2h":                            {5, "< or > after seen"},
		"seen!=2h":                           {5, "< or > after seen"},
		"seen<=2h":                           {5, "< or > after seen"},
		"seen >= 2h":                         {6, "< or > after seen"},
		"seen in (2h)":                       {6, "< or > after seen"},
		"seen not in (2h)":                   {6, "< or > after seen"},
		"seen>2":                             {6, "a duration such as"},
		"seen>-2h":                           {6, "a duration such as"},
		"seen>2h3d":                          {6, "a duration such as"},
		"seen>36501d":                        {6, "a duration such as"},
		"seen>36500d1s":                      {6, "a duration such as"},
		"seen>2*":                            {6, "a duration such as"},
		"seen>":                              {6, "a value"},
		"firmware<v2":                        {10, "a version that the firmware can read"},
		"firmware<2..1":                      {10, "a version"},
		"firmware>=2.*":                      {11, "a version"},
		`firmware< ""`:                       {11, "a version"},
		"firmware<":                          {10, "a value"},
		"state=on":                           {7, "one of online, offline, pending, contested after state"},
		"state=o*":                           {7, "one of online"},
		"state in (online, Offline)":         {19, "one of online, offline, pending, contested"},
		"transport!=udp":                     {12, "one of websocket, mqtt after transport"},
		"label.=x":                           {7, "a label of 1 to 63 characters"},
		"label.a.b=x":                        {8, "an operator"},
		`label."a b"=x`:                      {7, "a label of 1 to 63 characters"},
		`"a"=x`:                              {1, "a field"},
		strings.Repeat("a", 64):              {1, "a label of 1 to 63 characters"},
		"label." + strings.Repeat("a", 64):   {7, "a label of 1 to 63 characters"},
		"room=\xff":                          {6, "UTF-8"},
		many(33, "a", ","):                   {65, "at most 32 terms"},
		"a in (" + many(201, "b", ",") + ")": {407, "at most 200 values"},
		"a=" + strings.Repeat("b", MaxText):  {MaxText + 1, "at most 4096 bytes"},
		`a="` + strings.Repeat("\x01", MaxText/2) + `"`:                        {MaxText/2 + 5, "at most 4096 bytes in canonical form"},
		"a in (" + many(200, "x", ",") + "),b in(" + many(201, "x", ",") + ")": {813, "at most 200 values"},
	} {
		s, err := Parse(text)
		var syntax *SyntaxError
		if !errors.As(err, &syntax) {
			t.Errorf("%.60q: %v, %v", text, s, err)
			continue
		}
		if !s.IsZero() {
			t.Errorf("%.60q: an error and a selector %v", text, s)
		}
		if syntax.Column() != want.column || !strings.HasPrefix(syntax.Expected, want.expected) || syntax.Text != text {
			t.Errorf("%.60q: column %d, %v, want column %d, %s", text, syntax.Column(), err, want.column, want.expected)
		}
	}
	_, err := Parse("小灯 in lab")
	if want := `selector "room in lab", column 9: expected "(" and a list of values, found "lab"`; err == nil {
		t.Error("no error")
	} else if _, err = Parse("room in lab"); err.Error() != want {
		t.Errorf("%v, want %s", err, want)
	}
	if _, err = Parse("room in"); !strings.HasSuffix(err.Error(), "found the end") {
		t.Error(err)
	}
}

// The bounds themselves are allowed.
func TestBounds(t *testing.T) {
	var terms []string
	for i := range MaxTerms {
		terms = append(terms, "a"+strconv.Itoa(i))
	}
	var values []string
	for i := range MaxValues {
		values = append(values, strconv.Itoa(i))
	}
	for name, text := range map[string]string{
		"terms": strings.Join(terms, ","), "values": "a in (" + strings.Join(values, ",") + ")", "bytes": "a=" + strings.Repeat("b", MaxText-2),
		"label": strings.Repeat("a", MaxLabel), "age": "seen>36500d",
	} {
		if s := parse(t, text); s.IsZero() {
			t.Error(name)
		}
	}
}

func TestMatchIdentity(t *testing.T) {
	labels := map[string]string{"room": "lab"}
	for text, want := range map[string]bool{
		"": true, "device=d": true, "device=e": false, "room=lab": true, "room=lab,device=d": true, "room!=lab": false, "!floor": true, "floor!=1": true,
		// Nothing is known of the rest, so nothing of it may select a device.
		"!board": false, "board!=x": false, "state!=online": false, "!seen": false, "!tool": false, "room=lab,firmware!=2": false, "name not in (a)": false,
	} {
		if got := parse(t, text).MatchIdentity("d", labels); got != want {
			t.Errorf("%q: %v", text, got)
		}
	}
}

func TestMatchDoesNotAllocate(t *testing.T) {
	s := parse(t, "device=02*,room in (hall,lab),floor!=2,!x,state=online,transport=websocket,node=n*,!reason,name=Lamp*,board,chip!=a,firmware>=2.4,elf,seen<2h,tool=self.*")
	d := lamp()
	if n := testing.AllocsPerRun(100, func() {
		if !s.Match(d, now) {
			t.Fatal("not selected")
		}
	}); n != 0 {
		t.Errorf("Match: %v allocations", n)
	}
	s = parse(t, "device=02*,room in (hall,lab),floor!=2")
	if n := testing.AllocsPerRun(100, func() {
		if !s.MatchIdentity(d.ID, d.Labels) {
			t.Fatal("not selected")
		}
	}); n != 0 {
		t.Errorf("MatchIdentity: %v allocations", n)
	}
}

func TestIdentity(t *testing.T) {
	for text, want := range map[string]string{
		"": "", "device=a,room=lab,label.board=x,!y": "",
		"room=lab,board=x": "only device and labels may be used in API keys and policy: board is reported by the device itself",
		"tool":             "tool is reported", "chip=a": "chip is reported", "elf=a": "elf is reported", "firmware<2": "firmware is reported",
		"state=online": "state changes with the connection", "transport": "transport changes", "node": "node changes", "reason": "reason changes", "seen<2h": "seen changes",
		"name=a": "name is free text",
	} {
		err := parse(t, text).Identity()
		var field *FieldError
		if (err != nil) != (want != "") || err != nil && (!strings.Contains(err.Error(), want) || !errors.As(err, &field)) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}

func TestNeeds(t *testing.T) {
	for text, want := range map[string]bool{"": false, "device=a,device!=b": false, "room": true, "board=x": false, "device=a,label.board": true} {
		if got := parse(t, text).NeedsLabels(); got != want {
			t.Errorf("%q needs labels: %v", text, got)
		}
	}
	if s := parse(t, "room,tool=a"); !s.Needs(FieldTool) || s.Needs(FieldBoard) {
		t.Error("tool")
	}
}

func TestAnd(t *testing.T) {
	a, b := parse(t, "room=lab,state=online"), parse(t, "floor=1,room=lab")
	if got := And(a, b).String(); got != "floor=1,room=lab,state=online" {
		t.Error(got)
	}
	if And(a, Selector{}).String() != a.String() || And(Selector{}, b).String() != b.String() || !And(Selector{}, Selector{}).IsZero() {
		t.Error("the zero value changes something")
	}
	if a.String() != "room=lab,state=online" || b.String() != "floor=1,room=lab" {
		t.Errorf("changed: %v, %v", a, b)
	}
}

func TestFromMap(t *testing.T) {
	s := FromMap(map[string]string{"room": "a*", "device": "AABBCCDDEEFF", "board": "x"})
	if got := s.String(); got != `device=aa:bb:cc:dd:ee:ff,label.board=x,room="a\*"` {
		t.Error(got)
	}
	if err := s.Check(); err != nil {
		t.Error(err)
	}
	for name, values := range map[string]map[string]string{
		"a blank": {"a b": "x"}, "empty": {"": "x"}, "a dot": {"label.room": "x"}, "long": {strings.Repeat("a", 64): "x"}, "a quote": {`"`: "x"}, "long value": {"a": strings.Repeat("b", MaxText)},
	} {
		s := FromMap(values)
		if err := s.Check(); err == nil {
			t.Errorf("%s: %s is accepted", name, s)
		}
		if s.MatchIdentity("d", map[string]string{"room": "x", "a": "x"}) || !s.MatchIdentity("d", values) {
			t.Errorf("%s: matches something else", name)
		}
		if again, ok := s.Map(); !ok || !reflect.DeepEqual(again, values) {
			t.Errorf("%s: %v", name, again)
		}
	}
	if !FromMap(nil).IsZero() || !FromMap(map[string]string{}).IsZero() {
		t.Error("empty maps select something less")
	}
}

// Selectors in JSON as they were written before there was a text stay what they
// were, and are written again as they were.
func TestJSON(t *testing.T) {
	type document struct {
		Devices Selector `json:"devices,omitzero"`
	}
	for in, want := range map[string]string{
		`{}`:                             `{}`,
		`{"devices":null}`:               `{}`,
		`{"devices":{}}`:                 `{}`,
		`{"devices":""}`:                 `{}`,
		`{"devices":{"room":"lab"}}`:     `{"devices":{"room":"lab"}}`,
		`{"devices":"room=lab"}`:         `{"devices":{"room":"lab"}}`,
		`{"devices":{"board":"a,b"}}`:    `{"devices":{"board":"a,b"}}`,
		`{"devices":"label.board=x"}`:    `{"devices":{"board":"x"}}`,
		`{"devices":"board=x"}`:          `{"devices":"board=x"}`,
		`{"devices":"label.device=x"}`:   `{"devices":"label.device=x"}`,
		`{"devices":{"room":"a*"}}`:      `{"devices":{"room":"a*"}}`,
		`{"devices":"room=a*"}`:          `{"devices":"room=a*"}`,
		`{"devices":"room!=a"}`:          `{"devices":"room!=a"}`,
		`{"devices":"room in (a,b)"}`:    `{"devices":"room in (a,b)"}`,
		`{"devices":"room=a,room=b"}`:    `{"devices":"room=a,room=b"}`,
		`{"devices":"room"}`:             `{"devices":"room"}`,
		`{"devices":"room=\"\\xff\""}`:   `{"devices":"room=\"\\xff\""}`,
		`{"devices":{"a b":"c","d":""}}`: `{"devices":{"a b":"c","d":""}}`,
		`{"devices":{"device":"02:00:00:00:00:01","room":"lab"}}`: `{"devices":{"device":"02:00:00:00:00:01","room":"lab"}}`,
	} {
		var d document
		if err := json.Unmarshal([]byte(in), &d); err != nil {
			t.Errorf("%s: %v", in, err)
			continue
		}
		if out, err := json.Marshal(d); err != nil || string(out) != want {
			t.Errorf("%s becomes %s, want %s, %v", in, out, want, err)
		}
	}
	if out, err := json.Marshal(Selector{}); err != nil || string(out) != "{}" {
		t.Errorf("%s, %v", out, err)
	}
	many := map[string]string{}
	for i := range MaxTerms + 1 {
		many[strconv.Itoa(i)] = "x"
	}
	tooMany, _ := json.Marshal(many)
	for in, want := range map[string]string{`"room="`: "column 6", `7`: "a selector is text", `{"room":7}`: "a selector is text", `["room=lab"]`: "a selector is text", string(tooMany): "32 labels"} {
		var s Selector
		if err := json.Unmarshal([]byte(in), &s); err == nil || !strings.Contains(err.Error(), want) || !s.IsZero() {
			t.Errorf("%.60s: %v, %v", in, s, err)
		}
	}
}

// texts that a generated selector is made of; what has a meaning in the grammar
// is frequent.
var pieces = []string{"room", "lab", "board", "label", "in", "not", "*", ",", "(", ")", "=", `"`, `\`, "!", "<", ">", " ", "\t", "\x00", "\xff", "\u200b", "\ufffd", "小", "2.4", "aabbccddeeff", "AA", "d", "-", "."}

func randomText(r *rand.Rand) string {
	var b strings.Builder
	for range r.IntN(4) {
		b.WriteString(pieces[r.IntN(len(pieces))])
	}
	return b.String()
}

func randomTerm(r *rand.Rand) Term {
	t := Term{Field: Field(r.IntN(len(fieldNames))), Op: Op(r.IntN(int(OpLacks) + 1))}
	if t.Field == FieldLabel {
		t.Label = []string{"room", "board", "label", "in", "not", "device", "0", "-", "_x"}[r.IntN(9)]
	}
	if t.Field == FieldSeen || t.Field == FieldFirmware && r.IntN(2) == 0 {
		t.Op = []Op{OpLess, OpGreater}[r.IntN(2)]
		if t.Version = "2." + strconv.Itoa(r.IntN(20)); t.Field == FieldSeen {
			t.Age, t.Version = time.Duration(r.Int64N(int64(maxAge))), ""
		}
		return t.finish()
	}
	for n := 1 + r.IntN(3); t.Op <= OpNotIn && len(t.Values) < n; {
		v := Value{Text: randomText(r)}
		switch t.Field {
		case FieldDevice:
			v.Text = normalID(v.Text)
		case FieldState:
			v.Text = []string{"online", "pending"}[r.IntN(2)]
		case FieldTransport:
			v.Text = []string{"mqtt", "websocket"}[r.IntN(2)]
		default:
			if r.IntN(3) == 0 {
				v = newValue([]string{randomText(r), randomText(r), randomText(r)})
			}
		}
		t.Values = append(t.Values, v)
	}
	return t.finish()
}

// The text of any selector is parsed as that selector, and so is its JSON.
func TestRoundTrip(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 20_000 {
		var terms []Term
		for range r.IntN(4) {
			terms = append(terms, randomTerm(r))
		}
		s := newSelector(terms)
		checkRoundTrip(t, s)
	}
}

func checkRoundTrip(t *testing.T, s Selector) {
	t.Helper()
	again, err := Parse(s.String())
	if err != nil {
		t.Fatalf("%q: %v", s, err)
	}
	if again.String() != s.String() || !equal(again, s) {
		t.Fatalf("%q becomes %q", s, again)
	}
	text, err := json.Marshal(s)
	var read Selector
	if err := errors.Join(err, json.Unmarshal(text, &read)); err != nil || !equal(read, s) {
		t.Fatalf("%s becomes %q, %v", text, read, err)
	}
}

func equal(a, b Selector) bool {
	plain := func(s Selector) []Term {
		terms := s.Terms()
		for i := range terms {
			terms[i].tool = nil
		}
		return terms
	}
	return reflect.DeepEqual(plain(a), plain(b))
}

func FuzzParse(f *testing.F) {
	for _, text := range []string{"", "room=lab,state=online", "room in (a,b),!x,y not in (c)", `name="a\x41 *\*",label.board!=b`, "firmware>=2.4,firmware<3", "seen>1d2h", "device=AABBCCDDEEFF", "room=", `a="`, "tool=*"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		s, err := Parse(text)
		var syntax *SyntaxError
		if errors.As(err, &syntax) {
			if syntax.Offset < 0 || syntax.Offset > len(text) || syntax.Column() < 1 || syntax.Expected == "" || syntax.Found == "" || !s.IsZero() {
				t.Fatalf("%#v", syntax)
			}
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range []*Device{lamp(), shelf(), blank()} {
			for _, term := range s.Terms() {
				opposite := term
				switch term.Op {
				case OpIn:
					opposite.Op = OpNotIn
				case OpHas:
					opposite.Op = OpLacks
				default:
					continue
				}
				if term.match(d, now) == opposite.match(d, now) {
					t.Fatalf("%s and its opposite are both %v", term, term.match(d, now))
				}
			}
			s.Match(d, now)
		}
		checkRoundTrip(t, s)
	})
}

func TestNot(t *testing.T) {
	for text, want := range map[string]string{"state=online": "state!=online", "room!=lab": "room=lab", "room in (a,b*)": "room not in (a,b*)", "room": "!room",
		"!room": "room", "tool=self.x": "tool!=self.x", "firmware<2.0.0": "", "seen>1h": ""} {
		s, err := Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		not, ok := Not(s.Terms()[0])
		if ok != (want != "") || not.String() != want {
			t.Errorf("not %s: %q, %v", text, not.String(), ok)
		}
		if again, _ := Parse(text); again.String() != s.String() {
			t.Errorf("%s changed", text)
		}
	}
}
