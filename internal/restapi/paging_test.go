package restapi

import (
	"context"
	"encoding/json"
	"fmt"
	"net/url"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"fleetd/internal/credential"
	"fleetd/internal/devices"
	"fleetd/internal/racetest"
)

// A cursor shows nothing of the list, belongs to its filters, and cannot be altered.
func TestCursors(t *testing.T) {
	f := newFleet(t)
	for i := range 3 {
		f.ports.SaveDevice(devices.Device{ID: devices.ID(fmt.Sprintf("lamp-%d", i)), Name: "lamp", Admission: devices.AdmissionMember})
	}
	var p struct {
		Items      []struct{ ID string }
		NextCursor string `json:"next_cursor"`
	}
	f.do(t, "GET", "/v1/devices?limit=1&q=lamp", "").json(t, &p)
	cursor := p.NextCursor
	if cursor == "" || strings.Contains(cursor, "lamp") {
		t.Fatalf("cursor %q", cursor)
	}
	f.do(t, "GET", "/v1/devices?limit=2&q=lamp&cursor="+cursor, "").json(t, &p)
	if len(p.Items) != 2 || p.Items[0].ID != "lamp-1" {
		t.Errorf("with another limit: %+v", p)
	}
	altered := "A" + cursor[1:]
	if cursor[0] == 'A' {
		altered = "B" + cursor[1:]
	}
	for _, path := range []string{"/v1/devices?q=lam&cursor=" + cursor, "/v1/devices?q=lamp&sort=name&cursor=" + cursor, "/v1/nodes?cursor=" + cursor,
		"/v1/devices?q=lamp&cursor=" + altered, "/v1/devices?q=lamp&cursor=bGFtcC0x"} {
		if r := f.do(t, "GET", path, "").problem(t, 400, devices.CodeBadRequest); !strings.Contains(r.Detail, "begin again without cursor") {
			t.Errorf("%s: %+v", path, r)
		}
	}
}

// A duration counts from the time of the first page.
func TestRelativeTimes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mint, err := credential.New([]byte("0123456789abcdef"))
		if err != nil {
			t.Fatal(err)
		}
		s := &Server{opt: Options{Mint: mint}}
		first, err := s.page(context.Background(), Page{Limit: 1})
		if err != nil {
			t.Fatal(err)
		}
		begun := time.Now()
		time.Sleep(time.Hour)
		second, err := s.page(context.Background(), Page{Limit: 1, Cursor: first.cursor("x")})
		if err != nil {
			t.Fatal(err)
		}
		if at, err := second.time("since", "30m"); err != nil || !at.Equal(begun.Add(-30*time.Minute)) || second.after != "x" {
			t.Errorf("%v, %v, after %q", at, err, second.after)
		}
	})
}

// So does one in a selection.
func TestRelativeTimesInSelections(t *testing.T) {
	f := newFleet(t)
	for id, seen := range map[devices.ID]time.Duration{"a": time.Hour, "b": 0, "c": time.Hour} {
		f.put(id, "", "", nil)
		f.ports.SavePresence(devices.Presence{Device: id, Epoch: 1, LastSeen: time.Now().Add(-seen)})
	}
	const query = "?select=seen%3E1s&limit=1"
	next := func(path, cursor string) (ids, following string) {
		var p struct {
			Items      []struct{ ID string }
			Groups     []struct{ Devices []string }
			NextCursor string `json:"next_cursor"`
		}
		f.do(t, "GET", path+query+"&cursor="+cursor, "").json(t, &p)
		for _, d := range p.Items {
			ids += d.ID
		}
		for _, g := range p.Groups {
			ids += strings.Join(g.Devices, "")
		}
		return ids, p.NextCursor
	}
	first, cursor := next("/v1/devices", "")
	firstOffline, cursorOffline := next("/v1/explain", "")
	time.Sleep(time.Second) // b was seen more than a second ago now
	second, _ := next("/v1/devices", cursor)
	if first != "a" || second != "c" {
		t.Errorf("the pages have %s and %s", first, second)
	}
	secondOffline, _ := next("/v1/explain", cursorOffline)
	if firstOffline != "a" || secondOffline != "c" {
		t.Errorf("explained are %s and %s", firstOffline, secondOffline)
	}
}

// A page ends at pageBytes, and what is read for it is bounded as well; every item is on one page.
func TestPagesAreBoundedInBytes(t *testing.T) {
	racetest.Skip(t, "what one goroutine computes")
	mint, err := credential.New([]byte("0123456789abcdef"))
	if err != nil {
		t.Fatal(err)
	}
	s := &Server{opt: Options{Mint: mint}}
	var items []string
	for i := range 500 {
		size := 64 << 10
		if i%100 == 50 {
			size = 2 << 20 // larger than a page
		}
		items = append(items, fmt.Sprintf("%04d ", i)+strings.Repeat("x", size))
	}
	place := func(item *string) string { return (*item)[:4] }
	var got []string
	for cursor, pages := "", 0; ; pages++ {
		p, err := s.page(context.Background(), Page{Limit: MaxLimit, Cursor: cursor})
		if err != nil {
			t.Fatal(err)
		}
		largest := 0
		page, err := fillPage(p, 16, func(after string, n int) ([]string, string, error) {
			list, next, err := inMemory(items, place)(after, n)
			largest = max(largest, len(list))
			return list, next, err
		})
		if err != nil {
			t.Fatal(err)
		}
		text, err := json.Marshal(page.Items)
		if err != nil {
			t.Fatal(err)
		}
		if len(text) > pageBytes+2 && len(page.Items) > 1 || len(page.Items) == 0 || largest > 16 {
			t.Fatalf("page %d has %d items in %d bytes; %d were read at once", pages, len(page.Items), len(text), largest)
		}
		got = append(got, page.Items...)
		if cursor = page.NextCursor; cursor == "" {
			break
		}
	}
	if len(got) != len(items) {
		t.Fatalf("%d items of %d", len(got), len(items))
	}
	for i := range got {
		if got[i] != items[i] {
			t.Fatalf("item %d is %.10q", i, got[i])
		}
	}
}

func TestListNames(t *testing.T) {
	name := func(text string) string {
		u, err := url.Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		return listName(*u)
	}
	if a, b := name("/v1/x?b=2&a=1&limit=3&cursor=z"), name("/v1/x?a=1&b=2"); a != b {
		t.Errorf("%q, %q", a, b)
	}
	if a, b := name("/v1/x?a=1"), name("/v1/y?a=1"); a == b {
		t.Error("two paths have one name")
	}
}
