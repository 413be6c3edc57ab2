package models

import (
	"cmp"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// What a model knows of words: common nouns in five languages, by meaning; kinds of devices first.
const kinds = `lamp light lights bulb lampe leuchte licht lampada luce luz luces lampara lumiere 灯 台灯 灯光; speaker loudspeaker lautsprecher enceinte haut_parleur altavoz altavoces bocina altoparlante 音箱 音响 喇叭;
display screen anzeige bildschirm monitor ecran pantalla schermo 屏幕 显示屏 屏; camera kamera videocamera camara webcam 摄像头 摄像机 相机; robot roboter 机器人; toy spielzeug jouet juguete giocattolo 玩具`
const nouns = `kitchen kuche cuisine cocina cucina 厨房; living_room wohnzimmer salon 客厅; bedroom schlafzimmer dormitorio 卧室; study arbeitszimmer estudio 书房; hallway flur couloir pasillo 走廊;
garage garaje 车库; garden garten jardin 花园; bathroom badezimmer bano 浴室; nursery kinderzimmer 婴儿房 儿童房; room zimmer chambre habitacion cuarto 房间 客房; reception rezeption recepcion empfang front_desk 前台;
entrance eingang entree entrada 门口 入口; library bibliothek bibliotheque biblioteca 图书馆; canteen kantine mensa cantine cafeteria 食堂; gym turnhalle sporthalle gymnase gimnasio 体育馆; music musik musique musica 音乐;
chemistry chemie chimie quimica 化学; physics physik physique fisica 物理; lab labor labo laboratoire laboratorio 实验室; office buro bureau oficina 办公室; meeting_room besprechungsraum salle_de_réunion sala_de_reuniones 会议室;
dining_room esszimmer salle_à_manger comedor 餐厅; breakfast_room fruhstucksraum sala_colazione; pool schwimmbad piscine piscina 泳池; courtyard hof patio cour cortile 院子; storeroom warehouse lager entrepot almacen 仓库;
shelf shelves regal etagere estante estanteria 货架; dock 码头; cart wagen chariot carrito 小车; classroom klassenzimmer aula 教室; balcony balkon balcon 阳台; underground_garage tiefgarage; staff_room lehrerzimmer; loading_bay laderampe`
const small = ` the a an of in on at to by my our that this these those it all every each both from with for der die das den dem des ein eine einem einer im am an auf vom von zum zur bei beim unser mein alle aller allen jede beide le la les l un une d de du au aux dans sur chez avec tous toutes mon ma mes el los lo las una unos del al en con por todas todos mi mis 的 把 所有 全部 每个 都 里 那个 这个 号 在 上 用 请 `

var (
	concepts, isKind = map[string]string{}, map[string]bool{}
	cut              *strings.Replacer // parts Chinese words, and joins "living room"
	accents          = strings.NewReplacer("á", "a", "à", "a", "â", "a", "ä", "a", "é", "e", "è", "e", "ê", "e", "í", "i", "î", "i", "ó", "o", "ô", "o", "ö", "o", "ú", "u", "ü", "u", "ñ", "n", "ç", "c", "ß", "ss")
	allRE            = regexp.MustCompile(`(^|\s)(all|every|each|both|alle[rn]?|jede|beide|tous|toutes|todas|todos)\s|所有|全部|每个|都`)
	rangeRE          = regexp.MustCompile(`(\d+)\s*号?\s*(?:to|through|bis|a|à|al|au|hasta|-|–|到|至)\s*(\d+)`)
	andRE            = regexp.MustCompile(`\s(?:and|und|et|y)\s|[,&、，和与跟]`)
	elisionRE        = regexp.MustCompile(`(^|\s)([dl])['’]`)
	wordRE           = regexp.MustCompile(`\p{Han}+|\d+|\p{Latin}[\p{Latin}\d_]*`)
)

func init() {
	all := strings.Fields(small)
	for i, line := range strings.Split(kinds+";"+nouns, ";") {
		ws := strings.Fields(line)
		isKind[ws[0]] = i <= strings.Count(kinds, ";")
		for _, w := range ws { concepts[accents.Replace(w)] = ws[0] }
		all = append(all, ws...)
	}
	slices.SortFunc(all, func(a, b string) int { return len(b) - len(a) })
	var pairs []string
	for _, w := range all {
		if strings.Contains(w, "_") {
			pairs = append(pairs, strings.ReplaceAll(w, "_", " "), w, strings.ReplaceAll(w, "_", "-"), w)
		} else if w[0] >= 0xe3 {
			pairs = append(pairs, w, " "+w+" ")
		}
	}
	cut = strings.NewReplacer(append(pairs, "'", "", "’", "")...)
}

type token struct {
	orig, norm, concept string
	plural              bool
}

func (t token) kind() bool   { return isKind[t.concept] }
func (t token) place() bool  { return !isKind[t.concept] }
func (t token) number() bool { return t.norm[0] >= '0' && t.norm[0] <= '9' }

// words cuts a text into words, without the small ones.
func words(text string) (out []token) {
	text = cut.Replace(elisionRE.ReplaceAllString(strings.ToLower(text), "$1$2 "))
	for _, w := range wordRE.FindAllString(text, -1) {
		n := accents.Replace(w)
		if strings.Contains(small, " "+w+" ") || n == "a" { continue }
		if i, err := strconv.Atoi(n); err == nil { n = strconv.Itoa(i) }
		t := token{strings.ReplaceAll(w, "_", " "), n, concepts[n], n == "luces" || n == "lights" || n == "altavoces"}
		for _, suffix := range []string{"s", "es", "n", "en", "x"} {
			if stem := strings.TrimSuffix(n, suffix); t.concept == "" && concepts[stem] != "" {
				t = token{strings.TrimSuffix(w, suffix), stem, concepts[stem], true}
			}
		}
		out = append(out, t)
	}
	return out
}

// slip says whether two words differ by about one slip of the pen.
func slip(a, b string) bool {
	less := func(s string) []string {
		out := []string{s}
		for i := range len(s) { out = append(out, s[:i]+s[i+1:]) }
		return out
	}
	return len(a) > 4 && len(b) > 4 && slices.ContainsFunc(less(a), func(s string) bool { return slices.Contains(less(b), s) })
}

type device struct {
	id, name  string
	words     []token
	raw, tool map[string]any
	complete  bool // the server found every word
	literal   float64
}

func object(v any) map[string]any { m, _ := v.(map[string]any); return m }
func list(v any) []any            { l, _ := v.([]any); return l }
func str(v any) string            { s, _ := v.(string); return s }

func read(answer map[string]any) (out []*device) {
	for _, v := range list(answer["devices"]) {
		m := object(v)
		d := &device{id: cmp.Or(str(m["id"]), str(m["name"])), name: str(m["name"]), raw: m, tool: object(m["tool"])}
		d.words, d.complete = words(d.name), len(list(m["missing"])) == 0 && len(list(answer["missing"])) == 0
		out = append(out, d)
	}
	return out
}

// phrase is one meaning of the words of a person; one of the numbers must occur.
type phrase struct {
	tokens  []token
	numbers map[string]bool
}

// fits says whether the phrase means a device, and notes how literally.
func (p phrase) fits(d *device, trust bool) bool {
	have, number := map[string]bool{}, len(p.numbers) == 0 // "camera" beside another kind is Italian for a room
	for _, n := range d.words {
		if n.kind() { have[n.concept] = true }
		number = number || p.numbers[n.norm]
	}
	if len(have) > 1 { delete(have, "camera") }
	d.literal = 0
	for _, t := range p.tokens {
		best := 0.0
		if t.kind() {
			if len(have) > 0 && !have[t.concept] { return false }
			continue
		}
		for _, n := range d.words {
			if n.norm == t.norm {
				best = 1
			} else if t.concept != "" && t.concept == n.concept {
				best = max(best, .9)
			} else if t.concept == "" && slip(t.norm, n.norm) {
				best = max(best, .8)
			}
		}
		for _, n := range words(fmt.Sprint(d.raw["labels"])) {
			if n.norm == t.norm || t.concept != "" && t.concept == n.concept { best = max(best, .7) }
		}
		if trust && d.complete { best = max(best, .6) }
		if best == 0 { return false }
		d.literal += best
	}
	return number
}

// understand reads who is meant, and whether several are.
func understand(who string) (phrases []phrase, many bool) {
	who, many = strings.ToLower(who), allRE.MatchString(strings.ToLower(who))
	who = rangeRE.ReplaceAllStringFunc(who, func(s string) (out string) {
		m := rangeRE.FindStringSubmatch(s)
		a, _ := strconv.Atoi(m[1])
		b, _ := strconv.Atoi(m[2])
		for ; a <= b && b-a < 200; a++ { out += fmt.Sprint(" ", a, " ") }
		return out
	})
	numbers := map[string]bool{}
	var kinds, others []token
	for _, part := range andRE.Split(who, -1) {
		var p phrase
		for _, t := range words(part) {
			many = many || t.plural
			if t.number() {
				numbers[t.norm] = true
			} else if p.tokens = append(p.tokens, t); t.kind() {
				kinds = append(kinds, t)
			} else {
				others = append(others, t)
			}
		}
		if len(p.tokens) > 0 { phrases = append(phrases, p) }
	}
	many = many || len(numbers) > 1 || len(phrases) > 1
	for i := range phrases { // "the lamp and the speaker of the bar", "X's and Y's lamp"
		p := &phrases[i]
		if len(phrases) > 1 && !slices.ContainsFunc(p.tokens, token.kind) {
			p.tokens = append(p.tokens, kinds...)
		} else if len(phrases) > 1 && !slices.ContainsFunc(p.tokens, token.place) {
			p.tokens = append(p.tokens, others...)
		}
		if p.numbers = numbers; len(numbers) == 1 {
			for n := range numbers { p.tokens, p.numbers = append(p.tokens, token{orig: n, norm: n}), nil }
		}
	}
	return phrases, many
}

// find asks the server, by other words if need be, for the devices that fit best.
func find(h Host, p phrase, do string, many bool) []*device {
	var asPut, english, kind []string
	for _, t := range p.tokens {
		if asPut, english = append(asPut, t.orig), append(english, t.orig); t.concept != "" { english[len(english)-1] = t.concept }
		if t.kind() { kind = append(kind, t.concept) }
	}
	queries := []string{strings.Join(asPut, " "), strings.ReplaceAll(strings.Join(english, " "), "_", " "), strings.Join(kind, " ")}
	for i, q := range queries {
		if i > 0 && (q == "" || slices.Contains(queries[:i], q)) { continue }
		args := map[string]any{"query": q}
		if do != "" { args["do"] = do }
		if many || i == 2 { args["limit"] = 100 }
		good, top := []*device(nil), 0.0
		for next := "first"; next != ""; {
			answer, failed := h.Call("find_devices", args)
			for _, d := range read(answer) {
				if d.raw["exact"] == true && i == 0 && !many { return []*device{d} }
				if p.fits(d, i < 2) { good, top = append(good, d), max(top, d.literal) }
			}
			if next = str(answer["next_cursor"]); failed || args["limit"] == nil { next = "" }
			args["cursor"] = next
		}
		if good = slices.DeleteFunc(good, func(d *device) bool { return d.literal < top-.04 }); len(good) > 0 { return good }
	}
	return nil
}

func props(tool map[string]any) map[string]any {
	return object(object(tool["input_schema"])["properties"])
}

func settings(values map[string]any) map[string]any {
	out := maps.Clone(values)
	maps.DeleteFunc(out, func(k string, _ any) bool { return k == "at" || k == "later" || k == "cron" })
	return out
}

// suits says whether a tool does what is asked, as far as its name and schema tell.
func suits(tool map[string]any, r Request) bool {
	name := regexp.MustCompile(`[^a-z]+`).Split(strings.ToLower(str(tool["name"])), -1)
	for _, pair := range [][2]string{{"on", "off"}, {"off", "on"}, {"set", "get"}} {
		if slices.Contains(strings.Fields(r.Do), pair[0]) && slices.Contains(name, pair[1]) && len(props(tool)) == 0 { return false }
	}
	return str(tool["name"]) != "" && (len(settings(r.Values)) == 0 || len(props(tool)) > 0)
}

// describe looks the tool up if find_devices did not show a fitting one.
func describe(h Host, d *device, r Request) map[string]any {
	answer, _ := h.Call("describe_device", map[string]any{"device": d.id, "query": r.Do})
	for _, v := range append(list(answer["tools"]), list(object(answer["device"])["tools"])...) {
		if suits(object(v), r) { return object(v) }
	}
	return nil
}

func arguments(tool map[string]any, r Request) map[string]any {
	args, set := map[string]any{}, settings(r.Values)
	for _, byName := range []bool{true, false} {
		for k, p := range props(tool) {
			for v, value := range set {
				if value == nil { continue }
				_, isText := value.(string)
				named := strings.Contains(k, v) || strings.Contains(v, k)
				typed := isText == (str(object(p)["type"]) == "string") && object(p)["type"] != "boolean"
				if args[k] == nil && (byName && named || !byName && typed) { args[k], set[v] = value, nil }
			}
		}
	}
	for _, v := range list(object(tool["input_schema"])["required"]) {
		k, p := str(v), object(props(tool)[str(v)])
		enum := list(p["enum"])
		switch {
		case args[k] != nil:
		case p["type"] == "boolean":
			args[k] = !strings.Contains(r.Do, "off")
		case len(enum) > 0:
			i := slices.IndexFunc(enum, func(e any) bool { return strings.Contains(r.Do, fmt.Sprint(e)) })
			args[k] = enum[max(i, 0)]
		case p["type"] == "string":
			args[k] = cmp.Or(str(p["default"]), r.Text)
		default:
			args[k] = cmp.Or(p["default"], p["minimum"], any(1))
		}
	}
	return args
}

// when makes a clock time, or a time from now, the next such time.
func when(v any) any {
	now := time.Now()
	if d, err := time.ParseDuration(fmt.Sprint(v)); err == nil { return now.Add(d).Format(time.RFC3339) }
	c, err := time.Parse("15:04", fmt.Sprint(v))
	if err != nil { return v }
	t := time.Date(now.Year(), now.Month(), now.Day(), c.Hour(), c.Minute(), 0, 0, now.Location())
	if !t.After(now) { t = t.AddDate(0, 0, 1) }
	return t.Format(time.RFC3339)
}

func call(h Host, tool string, args map[string]any) string {
	answer, failed := h.Call(tool, args)
	if e := object(answer["error"]); failed { return fmt.Sprint("That failed: ", e["code"], " ", e["detail"], ". ") }
	return fmt.Sprint(answer, ". ")
}

// leaf finds a value by the last part of its name.
func leaf(v any, key string) any {
	for k, v := range object(v) {
		if found := leaf(v, key); found != nil { return found }
		if object(v) == nil && k[strings.LastIndex(k, ".")+1:] == key { return v }
	}
	return nil
}

// undo reads the last call of one's own that changed something, and sets back the values before.
func undo(h Host) Said {
	answer, _ := h.Call("list_recent_events", map[string]any{"type": "call", "limit": 5})
	for _, v := range slices.Backward(list(answer["events"])) {
		var tool, id, name string
		var was, before any
		for _, e := range []map[string]any{object(v), object(object(v)["data"]), object(object(v)["device"])} {
			tool, id = cmp.Or(tool, str(e["tool"])), cmp.Or(id, str(e["device"]), str(e["device_id"]))
			name = cmp.Or(name, str(e["device_name"]), str(e["name"]))
			was, before = cmp.Or(was, e["arguments"]), cmp.Or(before, e["before"])
		}
		id = cmp.Or(id, str(object(object(v)["device"])["id"]))
		args := map[string]any{}
		for k := range object(was) {
			if args[k] = leaf(before, k); args[k] == nil { delete(args, k) }
		}
		if stem := strings.TrimSuffix(tool, "off"); len(object(was)) == 0 && stem != tool {
			tool = stem + "on"
		} else if stem := strings.TrimSuffix(tool, "on"); len(object(was)) == 0 && stem != tool {
			tool = stem + "off"
		} else if len(args) == 0 {
			continue
		}
		return Said{[]string{cmp.Or(name, id)}, call(h, "call_device_tool", map[string]any{"device": id, "tool": tool, "arguments": args})}
	}
	return Said{Text: "I find nothing that I could undo."}
}

// Policy plays the model.
func Policy(h Host, r Request) Said {
	if r.Kind == "undo" { return undo(h) }
	phrases, many := understand(r.Who)
	asking, do := r.Kind == "status" || r.Kind == "history", r.Do
	many = !asking && (many || r.Kind == "group")
	if asking || r.Kind == "message" { do = "" }
	var devices []*device
	for _, p := range phrases {
		for _, d := range find(h, p, do, many) {
			if !slices.ContainsFunc(devices, func(o *device) bool { return o.id == d.id }) { devices = append(devices, d) }
		}
	}
	if len(devices) == 0 { return Said{Text: "The fleet has no such device."} }
	var names, ids []string
	able := slices.DeleteFunc(slices.Clone(devices), func(d *device) bool { return do != "" && !suits(d.tool, r) })
	if len(able) > 0 && !many { devices = able }
	for _, d := range devices { names, ids = append(names, d.name), append(ids, d.id) }
	if len(devices) > 1 && !many {
		i := max(0, slices.Index(names, h.Ask("Which one do you mean?", names)))
		devices, names, ids = devices[i:i+1], names[i:i+1], ids[i:i+1]
	}
	switch r.Kind {
	case "history":
		return Said{names, call(h, "list_recent_events", map[string]any{"type": "call", "device": ids[0]})}
	case "status":
		return Said{names, call(h, "get_device_status", map[string]any{"device": ids[0]})}
	case "message":
		return Said{names, call(h, "send_message", map[string]any{"devices": ids, "text": fmt.Sprint(r.Values["text"])})}
	}
	said, at, cron, later := Said{Devices: names}, when(r.Values["at"]), r.Values["cron"], r.Values["later"]
	byTool := map[string][]string{}
	for i, d := range devices {
		if !suits(d.tool, r) { d.tool = describe(h, d, r) }
		byTool[str(d.tool["name"])] = append(byTool[str(d.tool["name"])], ids[i])
	}
	for name, ids := range byTool {
		i := slices.IndexFunc(devices, func(d *device) bool { return d.id == ids[0] })
		args := map[string]any{"tool": name, "arguments": arguments(devices[i].tool, r)}
		switch tool := "call_many"; {
		case name == "":
			said.Text += "Some cannot do that. "
		case at != nil || cron != nil || later != nil && len(ids) > 1:
			args["select"] = "id in (" + strings.Join(ids, ",") + ")"
			for k, v := range map[string]any{"at": at, "cron": cron, "until": later} {
				if v != nil { args[k] = v }
			}
			if answer, failed := h.Call("find_devices", map[string]any{"select": args["select"]}); failed || len(list(answer["devices"])) == 0 {
				args["select"] = "name in (" + strings.Join(names, ",") + ")"
			}
			said.Text += call(h, "run_job", args)
		default:
			if len(ids) == 1 {
				tool, args["device"] = "call_device_tool", ids[0]
			} else {
				args["devices"] = ids[:min(100, len(ids))]
			}
			if later != nil { args["later"] = later }
			said.Text += call(h, tool, args)
		}
	}
	return said
}
