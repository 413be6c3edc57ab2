package models

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Common nouns in five languages, by meaning; the first six are kinds of devices, numbers come last.
const dictionary = `lamp light bulb lampe licht leuchte lumiere ampoule lampara luz luces lampada 灯 灯光;speaker loudspeaker box lautsprecher enceinte haut_parleur altavoz altavoces bocina altoparlante 音箱 音响 喇叭 扬声器;display screen monitor anzeige bildschirm ecran afficheur pantalla schermo 屏幕 显示屏 屏;camera cam kamera videocamera camara webcam 摄像头 摄像机 相机;robot roboter robots 机器人;toy spielzeug jouet juguete giocattolo 玩具;
kitchen kuche cuisine cocina cucina 厨房;living_room wohnzimmer salon salle_de_sejour sala_de_estar 客厅;bedroom schlafzimmer chambre_a_coucher dormitorio 卧室;study arbeitszimmer estudio 书房;hallway corridor flur couloir pasillo 走廊;garage garaje 车库;garden garten jardin 花园;bathroom badezimmer bad salle_de_bain bano 浴室;nursery kinderzimmer 儿童房 婴儿房;room zimmer chambre habitacion cuarto 房间 客房;reception rezeption recepcion empfang accueil front_desk 前台;entrance door eingang entree entrada ingresso 门口 入口;library bibliothek bucherei bibliotheque biblioteca 图书馆;canteen cafeteria kantine mensa cantine 食堂;gym turnhalle sporthalle gymnase gimnasio 体育馆 健身房;music musik musique musica 音乐;chemistry chemie chimie quimica 化学;physics physik physique fisica 物理;lab labor laboratoire laboratorio 实验室;office buro bureau oficina 办公室;meeting_room conference_room besprechungsraum salle_de_reunion sala_de_reuniones 会议室;dining_room esszimmer speisesaal salle_a_manger comedor 餐厅;breakfast_room fruhstucksraum sala_colazione sala_de_desayuno 早餐厅;pool schwimmbad piscine piscina 泳池;courtyard hof patio cour cortile 院子;warehouse storeroom lager entrepot almacen 仓库;shelf shelves regal etagere estante 货架;dock quai muelle 码头;cart wagen chariot carrito 小车 推车;classroom klassenzimmer salle_de_classe aula 教室;balcony balkon balcon 阳台;underground_garage tiefgarage parking 地下车库;staff_room teachers_room lehrerzimmer salle_des_professeurs sala_de_profesores 教师办公室;loading_bay laderampe quai_de_chargement muelle_de_carga 装卸区;forklift gabelstapler carretilla 叉车;siren sirene sirena 警报器;panel panneau tafel paneau 面板;spare ersatz 备用;2 two zwei deux dos;3 three drei trois tres;4 four vier quatre cuatro;5 five funf cinq cinco;6 six sechs seis;7 seven sieben sept siete;8 eight acht huit ocho;9 nine neun neuf nueve;10 ten zehn dix diez;11 eleven elf onze once;12 twelve zwolf douze doce;13 thirteen dreizehn treize trece;14 fourteen vierzehn quatorze catorce;15 fifteen funfzehn quinze quince;16 sixteen sechzehn seize dieciseis`
const smallWords = ` the teh a an of in on at to by my our that this these those it all every each both from with for thing please der die das den dem des ein eine einem einer im am an auf vom von zum zur bei beim unser mein alle aller allen jede beide le la les l un une d de du au aux dans sur chez avec tous toutes mon ma mes petit petite el los lo las una unos del al en con por todas todos mi mis nuestro s et und and y e 的 把 所有 全部 每个 都 里 里面 那个 这个 号 在 上 用 请 和 与 number numero nummer nr salle sala raum `

var (
	meaning, kinds   = map[string]string{}, map[string]bool{}
	join, plain      = strings.NewReplacer(), strings.NewReplacer("á", "a", "à", "a", "â", "a", "ä", "a", "é", "e", "è", "e", "ê", "e", "ë", "e", "í", "i", "î", "i", "ï", "i", "ó", "o", "ô", "o", "ö", "o", "ú", "u", "ù", "u", "û", "u", "ü", "u", "ñ", "n", "ç", "c", "ß", "ss", "’", "'") // join parts Chinese words, and joins "living room"
	spanRE, andRE    = regexp.MustCompile(`([a-z]?)(\d+)\s*号?\s*(?:to|through|thru|bis|a|à|al|au|hasta|-|–|到|至)\s*[a-z]?(\d+)`), regexp.MustCompile(`\s(?:and|und|et|y)\s|[,;、，和与]`)
	manyRE, codeRE   = regexp.MustCompile(`(^|\s)(all|every|both|alle[rn]?|beide|tous|toutes|todas|todos)\s|所有|全部|都`), regexp.MustCompile(`^[a-z]?\d+$`)
	elidedRE, wordRE = regexp.MustCompile(`\b([dl])'|'s\b|'(?:\s|$)`), regexp.MustCompile(`\p{Han}+|\b[a-z]?\d+|\d+|[\p{Latin}_]+`)
)

func init() {
	all, pairs := strings.Fields(smallWords), []string{}
	for i, line := range strings.Split(dictionary, ";") {
		words := strings.Fields(line)
		kinds[words[0]] = i < 6
		for _, w := range words {
			all, meaning[w] = append(all, w), words[0]
		}
	}
	slices.SortStableFunc(all, func(a, b string) int { return len(b) - len(a) })
	for _, w := range all {
		pairs = append(pairs, strings.ReplaceAll(w, "_", " "), map[bool]string{true: " " + w + " ", false: w}[w[0] > 0x7f])
	}
	join = strings.NewReplacer(pairs...)
}

// token is a word as said (accents and plural aside), and its meaning if it is a common noun or a number.
type token struct{ word, means string }

func (t token) kind() bool { return kinds[t.means] }

func tokens(text string) (out []token) {
	text = elidedRE.ReplaceAllString(plain.Replace(strings.ToLower(text)), "$1 ")
	for _, w := range wordRE.FindAllString(join.Replace(text), -1) {
		for _, suffix := range []string{"s", "es", "n", "en", "x"} {
			if stem := strings.TrimSuffix(w, suffix); meaning[w] == "" && meaning[stem] != "" {
				w = stem
			}
		}
		if w = strings.TrimLeft(w, "0"); !strings.Contains(smallWords, " "+w+" ") {
			out = append(out, token{w, meaning[w]})
		}
	}
	return out
}

// understand reads who is meant: kinds of devices, codes (204, a4), and other words.
func understand(who string) (kinds, codes, words []token) {
	who = spanRE.ReplaceAllStringFunc(strings.ToLower(who), func(s string) (out string) {
		m := spanRE.FindStringSubmatch(s)
		from, _ := strconv.Atoi(m[2])
		for to, _ := strconv.Atoi(m[3]); from <= to && len(out) < 2000; from++ {
			out += fmt.Sprintf(" %s%d ", m[1], from)
		}
		return out
	})
	for _, t := range tokens(who) {
		if t.kind() {
			kinds = append(kinds, t)
		} else if codeRE.MatchString(cmp.Or(t.means, t.word)) {
			codes = append(codes, t)
		} else {
			words = append(words, t)
		}
	}
	return kinds, codes, words
}

// slip says whether two long words are alike but for two letters in one place.
func slip(a, b string) (yes bool) {
	for i := range a {
		yes = yes || len(a) > 5 && len(b) > len(a)-2 && len(b) < len(a)+2 && strings.HasPrefix(b, a[:i]) && strings.HasSuffix(b, a[min(len(a), i+2):])
	}
	return yes
}

func object(v any) map[string]any { m, _ := v.(map[string]any); return m }
func list(v any) []any            { l, _ := v.([]any); return l }
func str(v any) string            { s, _ := v.(string); return s }
func none(_ string, v any) bool   { return v == nil }

type device struct {
	id, name      string
	tool          map[string]any
	words, labels []token
	score         float64
}

// has finds how literally a device has one of some words, and notes it; it may need none.
func (d *device) has(ts ...token) bool {
	best := 0.0
	for _, t := range ts {
		for i, n := range slices.Concat(d.words, d.labels) {
			if n.word == t.word && i < len(d.words) {
				best = 1
			} else if n.word == t.word || t.means != "" && n.means == t.means || t.means == "" && slip(t.word, n.word) {
				best = max(best, .85)
			}
		}
	}
	d.score += best
	return best > 0 || len(ts) == 0
}

// implied says which kinds of devices do what is to be done.
func implied(do string) []string {
	for _, p := range [][]string{{"volume", "speaker", "toy"}, {"photo", "camera"}, {"picture", "camera"}, {"theme", "display"}, {"message", "display"}, {"brightness", "display", "lamp"}, {"turn", "lamp"}} {
		if strings.Contains(do, p[0]) {
			return p[1:]
		}
	}
	return []string{""}
}

// find asks for devices by the words as said, then in English, then by the kind alone, and keeps those that fit best.
func find(h Host, r Request, acts, many bool, kinds, codes, words []token) (good []*device) {
	var queries [3]string
	for _, t := range slices.Concat(words, kinds, codes[:len(codes)%max(2, len(codes))]) { // one code, not several
		queries[0], queries[1] = queries[0]+" "+t.word, queries[1]+" "+cmp.Or(t.means, t.word)
	}
	could := implied(r.Do)
	queries[2] = " " + cmp.Or(append(kinds, token{})[0].means, could[0])
	can := func(t token) bool { return t.kind() && slices.Contains(could, t.means) }
	for i, query := range queries {
		top, bit, args := 0.0, map[bool]float64{true: 1}, map[string]any{"query": strings.TrimSpace(strings.ReplaceAll(query, "_", " ")), "do": map[bool]any{true: r.Do}[acts], "limit": map[bool]any{true: 100}[many || i == 2]}
		maps.DeleteFunc(args, none)
		for more := len(query) > 1 && !slices.Contains(queries[:i], query); more; {
			answer, failed := h.Call("find_devices", args)
			for _, v := range list(answer["devices"]) {
				m, name := object(v), str(object(v)["name"])
				d := &device{cmp.Or(str(m["id"]), name), name, object(m["tool"]), tokens(name), tokens(fmt.Sprint(m["labels"])), 0}
				trust := i < 2 && len(list(m["missing"]))+len(list(answer["missing"])) == 0 // the server knew all words
				lacks := func(t token) bool { return !d.has(t) && !trust }
				either := many && andRE.MatchString(r.Who) && d.has(words...)
				nameless, able := !slices.ContainsFunc(d.words, token.kind), could[0] == "" || slices.ContainsFunc(d.words, can)
				if (d.has(kinds...) || nameless) && d.has(codes...) && (either || !slices.ContainsFunc(words, lacks)) {
					d.score += 40*bit[!many && acts && suits(d.tool, r)] + 20*bit[nameless || able] + 10*bit[!many && m["exact"] == true]
					good, top = append(good, d), max(top, d.score)
				}
			}
			args["cursor"] = str(answer["next_cursor"])
			more = !failed && args["cursor"] != "" && args["limit"] != nil
		}
		if good = slices.DeleteFunc(good, func(d *device) bool { return d.score < top-.05 }); len(good) > 0 {
			break
		}
	}
	return good
}

// suits says whether a tool does what is to be done, as far as its name and schema tell.
func suits(tool map[string]any, r Request) bool {
	name := strings.ToLower(str(tool["name"]))
	against := strings.HasSuffix(name, "off") && strings.HasSuffix(r.Do, " on") || strings.HasSuffix(name, "on") && strings.HasSuffix(r.Do, " off") || strings.Contains(name, "get") && strings.Contains(r.Do, "set")
	for k := range r.Values { // volume, brightness, theme
		against = against || strings.Contains(r.Do, k) && !strings.Contains(name, k) && object(object(tool["input_schema"])["properties"])[k] == nil
	}
	return name != "" && !against
}

// arguments puts the values into a schema, by name or else by type, and fills what is required.
func arguments(schema map[string]any, r Request) map[string]any {
	args, properties := map[string]any{}, object(schema["properties"])
	for name, value := range r.Values {
		_, isText := value.(string)
		for k, p := range properties {
			if strings.Contains(k, name) || strings.Contains(name, k) || len(properties) == 1 && isText == (object(p)["type"] == "string") {
				args[k] = value
			}
		}
	}
	for _, v := range list(schema["required"]) {
		k, p := str(v), object(properties[str(v)])
		i := slices.IndexFunc(list(p["enum"]), func(e any) bool { return slices.Contains(strings.Fields(r.Do), fmt.Sprint(e)) })
		byType := map[any]any{"boolean": !strings.Contains(r.Do, "off"), "string": r.Text}[p["type"]]
		args[k] = cmp.Or(args[k], p["default"], append(list(p["enum"]), nil)[max(i, 0)], p["minimum"], byType, any(1))
	}
	return args
}

// call calls, and tells the person what came of it, the code and detail of an error included.
func call(h Host, tool string, args map[string]any) string {
	maps.DeleteFunc(args, none)
	answer, failed := h.Call(tool, args)
	return fmt.Sprint(map[bool]string{true: "That failed: ", false: "Done: "}[failed], answer, ". ")
}

// when makes "06:30" the next such time.
func when(v any) any {
	now := time.Now()
	if c, err := time.Parse("15:04", str(v)); err == nil {
		c = time.Date(now.Year(), now.Month(), now.Day(), c.Hour(), c.Minute(), 0, 0, now.Location())
		return c.AddDate(0, 0, map[bool]int{true: 1}[c.Before(now)]).Format(time.RFC3339)
	}
	return v
}

// undo sets back what the last call of one's own changed.
func undo(h Host) Said {
	answer, _ := h.Call("list_recent_events", map[string]any{"type": "call", "limit": 5})
	for _, v := range slices.Backward(list(answer["events"])) {
		e, args := maps.Clone(object(v)), map[string]any{}
		maps.Copy(e, object(e["data"]))
		before, _ := json.Marshal(e["before"])
		for k := range object(e["arguments"]) {
			if m := regexp.MustCompile(`[".]` + regexp.QuoteMeta(k) + `":("[^"]*"|[\w.]+)`).FindSubmatch(before); m != nil {
				_ = json.Unmarshal([]byte(`{"`+k+`":`+string(m[1])+`}`), &args)
			}
		}
		tool, id := str(e["tool"]), cmp.Or(str(e["device"]), str(e["device_id"]), str(object(e["device"])["id"]))
		if len(object(e["arguments"])) == 0 { // only on and off have an opposite
			tool = strings.NewReplacer("turn_on", "turn_off", "turn_off", "turn_on").Replace(tool)
		}
		if tool != str(e["tool"]) || len(args) > 0 {
			return Said{[]string{cmp.Or(str(e["device_name"]), str(object(e["device"])["name"]), str(e["name"]), id)}, call(h, "call_device_tool", map[string]any{"device": id, "tool": tool, "arguments": args})}
		}
	}
	return Said{Text: "I find nothing that I could undo."}
}

// Policy plays the model.
func Policy(h Host, r Request) (said Said) {
	if r.Kind == "undo" {
		return undo(h)
	} else if r.Who == "" && r.Kind == "history" {
		return Said{Text: call(h, "list_recent_events", map[string]any{"type": "call"})}
	}
	kinds, codes, words := understand(r.Who)
	acts := r.Kind != "status" && r.Kind != "history" && r.Kind != "message"
	many := r.Kind == "group" || len(codes) > 1 || manyRE.MatchString(strings.ToLower(r.Who))
	devices, byTool := find(h, r, acts, many, kinds, codes, words), map[string][]*device{}
	namesIDs := func(ds []*device) (names, ids []string) {
		for _, d := range ds {
			names, ids = append(names, d.name), append(ids, d.id)
		}
		return names, ids
	}
	names, ids := namesIDs(devices)
	if len(devices) == 0 {
		return Said{Text: "The fleet has no such device."}
	} else if len(devices) > 1 && !many {
		i := max(0, slices.Index(names, h.Ask("Which one do you mean?", names)))
		devices, names, ids = devices[i:i+1], names[i:i+1], ids[i:i+1]
	}
	said.Devices = names
	ask := map[string]string{"status": "get_device_status", "history": "list_recent_events", "message": "send_message"}[r.Kind]
	if args := map[string]map[string]any{"status": {"device": ids[0]}, "history": {"device": ids[0], "type": "call"}, "message": {"devices": ids, "text": r.Values["text"], "later": r.Values["later"]}}[r.Kind]; !acts {
		return Said{said.Devices, call(h, ask, args)}
	}
	for _, d := range devices {
		if !suits(d.tool, r) { // find_devices did not show it
			answer, _ := h.Call("describe_device", map[string]any{"device": d.id, "query": r.Do})
			tools := slices.DeleteFunc(slices.Concat(list(answer["tools"]), list(object(answer["device"])["tools"])), func(t any) bool { return !suits(object(t), r) })
			d.tool = object(append(tools, nil)[0])
		}
		byTool[str(d.tool["name"])] = append(byTool[str(d.tool["name"])], d)
	}
	at, cron, later := when(r.Values["at"]), r.Values["cron"], r.Values["later"]
	for name, group := range byTool {
		names, ids := namesIDs(group)
		tool, args := "call_device_tool", map[string]any{"tool": name, "arguments": arguments(object(group[0].tool["input_schema"]), r)}
		if name == "" {
			said.Text += fmt.Sprint(names, " cannot do that. ")
			continue
		} else if at != nil || cron != nil || later != nil && len(ids) > 1 {
			tool, args["at"], args["cron"], args["until"] = "run_job", at, cron, later
			for _, s := range []string{"id in (" + strings.Join(ids, ",") + ")", "name in (" + strings.Join(names, ",") + ")"} {
				answer, failed := h.Call("find_devices", map[string]any{"select": s, "limit": 100})
				if args["select"] = s; !failed && len(list(answer["devices"])) == len(ids) {
					break
				}
			}
		} else if len(ids) > 1 {
			tool, args["devices"] = "call_many", ids[:min(100, len(ids))]
		} else {
			args["device"], args["later"] = ids[0], later
		}
		said.Text += call(h, tool, args)
	}
	return said
}
