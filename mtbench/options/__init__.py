"""Options: one declaration gives an option's type, bounds, help, its text and value, and its errors."""

from mtbench.options.classes import option as option
from mtbench.options.fields import AUTO as AUTO
