package main

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
	"fleetd/internal/config"
	"fleetd/internal/selector"
)

// mac matches the ids of most devices, in any notation.
var mac = regexp.MustCompile(`^(?i)[0-9a-f]{2}([:-]?[0-9a-f]{2}){5}$`)

// Limits of the search for a device that is not found.
const (
	nearDevices   = 500 // devices whose names are compared
	shownNear     = 3
	mostDifferent = 2 // slips in a name
)

// nameDevices puts the id into each argument of a command that names one device: those with the tag device:"name", and with
// device:"former", where a device that is not known any longer has records, too.
func nameDevices(ctx context.Context, c *apiclient.Client, command reflect.Value) error {
	for i := range command.NumField() {
		kind, name := command.Type().Field(i).Tag.Get("device"), command.Field(i).String()
		if kind == "" {
			continue
		}
		id, err := deviceID(ctx, c, name, kind == "former")
		if err != nil {
			return err
		}
		command.Field(i).SetString(id)
	}
	return nil
}

// deviceID returns the id of the device that a person has named. An id wins over a name; former: also an id that no device has. A key
// that may not look devices up has to give the id.
func deviceID(ctx context.Context, c *apiclient.Client, name string, former bool) (string, error) {
	if name == "" || mac.MatchString(name) {
		return name, nil
	}
	_, err := c.Device(ctx, name)
	problem := (*apiclient.Problem)(nil)
	if !errors.As(err, &problem) || problem.Code != "device_unknown" && problem.Code != "bad_request" {
		return name, nil // it is an id, or the command itself says what is wrong
	}
	called := selector.In(selector.FieldName, name).String()
	page, listErr := devicePage(ctx, c, apiclient.Query{"select": called}, shownNear)
	switch {
	case listErr != nil:
		return name, nil
	case len(page) == 1:
		return page[0].ID, nil
	case former && problem.Code == "device_unknown": // what is no id is a bad request
		return name, nil
	case len(page) > 1:
		return "", exitError{fmt.Errorf("several devices are called %q: %s; give the id of one (`fleetd devices %s` lists them)", name, namesText(page), quoted(called)), exitRefused}
	}
	near, nearErr := nearTo(ctx, c, name)
	if nearErr != nil {
		return name, nil
	}
	if len(near) == 0 {
		return "", exitError{fmt.Errorf("no device has the id or the name %q; `fleetd devices` lists them", name), exitRefused}
	}
	return "", exitError{fmt.Errorf("no device has the id or the name %q; did you mean %s?", name, namesText(near)), exitRefused}
}

// nearTo returns some devices whose names have the text in them, else some whose names are nearly the same.
func nearTo(ctx context.Context, c *apiclient.Client, name string) ([]api.Device, error) {
	page, err := devicePage(ctx, c, apiclient.Query{"q": name}, shownNear)
	if err != nil || len(page) > 0 {
		return page, err
	}
	if page, err = devicePage(ctx, c, apiclient.Query{}, nearDevices); err != nil {
		return nil, err
	}
	different := func(d api.Device) int { return config.Distance(strings.ToLower(d.Name), strings.ToLower(name)) }
	page = slices.DeleteFunc(page, func(d api.Device) bool { return different(d) > mostDifferent })
	slices.SortStableFunc(page, func(a, b api.Device) int { return different(a) - different(b) })
	return page[:min(len(page), shownNear)], nil
}

// devicePage returns the first devices of a list.
func devicePage(ctx context.Context, c *apiclient.Client, query apiclient.Query, most int) ([]api.Device, error) {
	query["limit"] = strconv.Itoa(most)
	return apiclient.Collect(first(c.Devices(ctx, query), most))
}

// namesText writes devices as "name (id)".
func namesText(list []api.Device) string {
	texts := make([]string, len(list))
	for i, d := range list {
		texts[i] = fmt.Sprintf("%q (%s)", d.Name, d.ID)
	}
	return strings.Join(texts, ", ")
}
